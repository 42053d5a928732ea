"""Damaged inputs of every kind, drawn from a seed, and what becomes of each."""
