"""Artifacts on the Hugging Face Hub: what belongs to one there, and how it gets there."""
