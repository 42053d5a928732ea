"""What is written down and read back: the recipe, the manifest of an artifact, the report of an evaluation."""
