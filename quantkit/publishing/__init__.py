"""Push artifacts to the Hugging Face Hub."""
