"""Calibration: the walk through a model's blocks, and everything that is measured or trained on it."""
