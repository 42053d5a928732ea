"""Models of transformers without weights, and where their parts are."""
