"""The machine: memory, devices, files, the user's cache, other interpreters."""
