"""ggml's block types: packed, unpacked, and their scales fitted anew."""
