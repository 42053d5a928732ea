"""Scripts that load an artifact in one engine each and write its log-probabilities; run by that engine's python."""
