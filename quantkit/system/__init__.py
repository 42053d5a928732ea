"""Memory, devices, files, processes, and untrusted input."""
