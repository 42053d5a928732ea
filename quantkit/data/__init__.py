"""Texts, prompts, and the demo model."""
