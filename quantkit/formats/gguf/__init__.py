"""GGUF files: llama.cpp and what is built on it."""
