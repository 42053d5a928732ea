"""What a source, method, format, engine and probe must provide, and finding them."""
