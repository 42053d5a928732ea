"""Workers: one script for each tool, run by the python of that tool's own environment (`bench/environments.py`)."""
