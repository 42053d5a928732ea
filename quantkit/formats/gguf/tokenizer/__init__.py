"""A tokenizer as a GGUF file holds it."""
