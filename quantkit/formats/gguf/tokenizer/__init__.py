"""Convert tokenizers to GGUF, and compare them with llama.cpp's tokenization."""
