"""Calibration: the walk through a model's decoder blocks, and the statistics and training that use it."""
