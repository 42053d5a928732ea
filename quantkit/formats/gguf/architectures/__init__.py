"""Tables of the model architectures that quantkit writes as GGUF: tensor names, metadata keys, checks."""
