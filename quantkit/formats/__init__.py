"""Formats of stored tensors: one module or folder per format, each with a record named FORMAT."""
