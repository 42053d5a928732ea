"""Convert a model, measure the copy and the model itself, and print both perplexities.

Usage: python examples/convert_and_judge.py [MODEL] [--method rtn] [--bits 4] [--out FOLDER] [--text FILE]
"""

from __future__ import annotations

import argparse
import sys

import quantkit


def main() -> None:
    """Convert, measure, print."""
    parser = argparse.ArgumentParser(description="Convert a model and judge the result.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--method", default="rtn")
    parser.add_argument("--bits", default="4")
    parser.add_argument("--out", default="example-artifact")
    parser.add_argument("--text", help="UTF-8 text file; default: WikiText-2, or the bundled sample")
    arguments = parser.parse_args()

    artifact = quantkit.convert(arguments.model, arguments.method, arguments.bits, arguments.out, force=True)
    print(f"{artifact.label}: {artifact.manifest.bits_per_weight:.2f} bits per weight in {artifact.folder}")

    for model in (arguments.model, artifact):
        report = quantkit.evaluate(model, probes=("perplexity",), text=arguments.text, limit=4)
        perplexity = report.find("perplexity")
        assert perplexity is not None  # it was asked for
        engine = f"{report.engine.name} in {report.engine.dtype}"
        print(f"{report.model.label}: perplexity {perplexity.value:.2f} ± {perplexity.stderr:.2f} ({engine})")


if __name__ == "__main__":
    try:
        main()
    except quantkit.QuantkitError as error:
        sys.exit(f"error: {error}")
