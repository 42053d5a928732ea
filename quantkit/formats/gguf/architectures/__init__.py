"""What GGUF files of each architecture hold."""
