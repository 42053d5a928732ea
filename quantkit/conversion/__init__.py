"""Check, forecast, stage, write, prove."""
