"""One file an engine; each holds a record named ENGINE."""
