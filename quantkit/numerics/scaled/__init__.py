"""Weights of 8-bit integers, 8-bit floats and 4-bit floats times scales of rows, blocks or groups of columns."""
