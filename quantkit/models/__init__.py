"""Models as sources of tensors, and as transformers modules without weights."""
