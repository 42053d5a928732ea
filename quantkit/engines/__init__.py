"""The engines: each file is one engine and defines a record named ENGINE; `_torch_model` is shared code."""
