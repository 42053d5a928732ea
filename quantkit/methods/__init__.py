"""One file a method; each holds a record named METHOD."""
