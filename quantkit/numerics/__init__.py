"""Arithmetic on arrays and tensors: no files, no jobs."""
