"""Start a server for an artifact, and load-test servers."""
