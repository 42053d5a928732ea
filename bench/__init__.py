"""Measurements against other tools: their environments, their workers, one judge for all artifacts."""
