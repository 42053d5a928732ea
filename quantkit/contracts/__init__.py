"""Interfaces of sources, methods, formats and engines, and the registry that finds them."""
