"""Numerical routines on arrays and tensors; no file access."""
