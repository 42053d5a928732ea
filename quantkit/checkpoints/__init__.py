"""Read safetensors files lazily, spool tensors with a journal, and write checkpoints."""
