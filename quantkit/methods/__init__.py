"""Quantization methods: one file per method, each with a record named METHOD."""
