"""Storage formats of checkpoints: one module or package per format, each with a record named FORMAT."""
