"""A size or a divergence instead of a name: what methods share that choose types or bits by it."""
