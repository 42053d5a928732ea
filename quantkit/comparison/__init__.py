"""Convert and evaluate many variants of one model (compare) or of several (sweep)."""
