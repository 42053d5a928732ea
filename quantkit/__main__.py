"""`python -m quantkit`, also as `torchrun --nproc-per-node 2 -m quantkit`."""

from quantkit.cli.app import main

if __name__ == "__main__":
    main()
