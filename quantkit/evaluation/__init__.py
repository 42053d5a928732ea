"""Evaluation of models: token windows, baselines, child processes, cross-checks and tasks."""
