"""Architectures of GGUF files: their tensors, keys and checks."""
