"""Interfaces of methods, formats, engines and evaluated models, and the registry that finds them."""
