"""Convert a model in three ways, judge all by one ruler, print the table and write it as Markdown, CSV and JSON.

Usage: python examples/compare_three.py [MODEL] [--out FOLDER] [--text FILE]
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

import quantkit

VARIANTS = (
    {"method": "rtn", "bits": 4},
    {"method": "rtn", "bits": 8},
    {"method": "gptq", "bits": 4, "options": {"damp_percent": 0.05}},
)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description="Compare three variants of a model.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--out", default="example-comparison")
    parser.add_argument("--text", help="UTF-8 text file; default: WikiText-2, or the bundled sample")
    arguments = parser.parse_args()

    table = quantkit.compare(
        arguments.model,
        VARIANTS,
        calibration={"sequences": 16, "length": 128},
        evaluation={"text": arguments.text, "limit": 4, "threads": (1,)},
        out=arguments.out,
    )
    table.show(Console())
    print(f"{arguments.out}/table.md, table.csv, table.json and perplexity-size.svg hold the same")


if __name__ == "__main__":
    try:
        main()
    except quantkit.QuantkitError as error:
        sys.exit(f"error: {error}")
