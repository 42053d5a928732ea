"""Start a server for an artifact, and measure a server."""
