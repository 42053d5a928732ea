"""What transformers' architectures are like: their parts, published names, experts, and which are proven."""
