"""Windows, baselines, child processes, cross-checks and tasks."""
