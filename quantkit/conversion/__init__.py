"""Conversion of a model into an artifact: check, forecast, stage, write, verify."""
