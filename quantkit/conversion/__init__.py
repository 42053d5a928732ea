"""Check, forecast, stage, write, verify."""
