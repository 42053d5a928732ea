"""Read the tensors of an artifact back from its own bytes, and show how far each lies from its source.

Usage: python examples/read_back.py [MODEL] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys

import torch

import quantkit
from quantkit.contracts.registry import find_format
from quantkit.contracts.stored import open_stored, stored_values
from quantkit.formats.source import open_source


def main() -> None:
    """Convert by plain rounding, read back, print."""
    parser = argparse.ArgumentParser(description="Compare an artifact's tensors with those of its source.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--out", default="example-read-back")
    arguments = parser.parse_args()

    artifact = quantkit.convert(arguments.model, "rtn", 4, arguments.out, force=True)
    source = open_source(arguments.model)
    reader = open_stored(artifact, find_format(artifact.manifest.format))
    for name, stored in stored_values(reader):
        # Quantized layers come as integer codes with scales and zeros, all others as plain tensors.
        if isinstance(stored, torch.Tensor) or not name.endswith("down_proj.weight"):
            continue
        want = source.tensor(name).to(torch.float32)
        error = float((stored.dense() - want).norm() / want.norm())
        groups = stored.scales.shape[1]
        print(f"{name}: codes {tuple(stored.codes.shape)}, {groups} groups a row, relative error {error:.4f}")


if __name__ == "__main__":
    try:
        main()
    except quantkit.QuantkitError as error:
        sys.exit(f"error: {error}")
