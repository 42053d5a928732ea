"""Judging in chunks: some windows here, some on another machine, and one report of all, equal to the last digit."""
