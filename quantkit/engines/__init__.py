"""Engines: one file per engine, each with a record named ENGINE."""
