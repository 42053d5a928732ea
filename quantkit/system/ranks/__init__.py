"""Several processes that share one piece of work, as torchrun starts them."""
