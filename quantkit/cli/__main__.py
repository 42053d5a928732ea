"""`python -m quantkit.cli`."""

from quantkit.cli.app import main

main()
