"""Safetensors files: read lazily, spooled, journalled, written, whatever their tensors mean."""
