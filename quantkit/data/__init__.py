"""Texts for calibration and evaluation, prompts for speed tests, and the demo model."""
