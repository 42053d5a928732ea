"""What stored tensors mean: one folder a format; each holds a record named FORMAT."""
