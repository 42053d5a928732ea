"""The one walk through a model's blocks, and all that is learned on it."""
