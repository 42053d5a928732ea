"""Evaluate models: windows, baselines, child processes, cross-checks and tasks."""
