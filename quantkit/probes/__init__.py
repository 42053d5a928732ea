"""One file a measurement; each holds a record named PROBE."""
