"""File records: recipes, artifact manifests, and evaluation reports."""
