"""Pack and unpack ggml's block types, and refit their scales."""
