"""Models of transformers without weights, their sources, and the places of their parts."""
