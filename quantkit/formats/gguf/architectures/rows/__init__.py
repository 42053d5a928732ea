"""What llama.cpp wants of each architecture, a row each."""
