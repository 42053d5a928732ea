"""Checkpoint files: lazy readers of safetensors, side files, and a writer that can resume."""
