"""Safetensors files: read lazily, spooled with a journal, written."""
