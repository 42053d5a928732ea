"""Other judges, each a script of its own that prints one line of JSON; none of them uses quantkit's code."""
