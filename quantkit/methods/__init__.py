"""Quantization methods: one file or package per method, each with a record named METHOD."""
