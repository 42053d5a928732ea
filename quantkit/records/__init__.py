"""Records in files: recipes, manifests of artifacts, and reports of evaluations."""
