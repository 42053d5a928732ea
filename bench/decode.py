"""Milliseconds a token of the int4 decoder beside bfloat16 transformers, in turns in one process, on one thread.

Both generate greedily from the same prompt. The figure is the ratio of the medians; the exit code is 1 where a ratio
is above the target.

python -m bench.decode [--model k] [--repeats 7] [--tokens 64]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.folders import RESULTS, calibration_text
from bench.rows import GROUP_SIZES
from bench.run_peers import said_by
from quantkit.contracts.engine import LoadedModel, LoadSpec
from quantkit.contracts.registry import find_engine
from quantkit.formats.source import open_model
from quantkit.models.config import load_tokenizer

TARGET = 0.55
PROMPT = "The tower stands in the middle of the old town, and people say that it"
CONVERSIONS = {"gptq-4": ("gptq", "--no-gptaq"), "awq-4": ("awq",)}
FEW = ("--calibration-sequences", "8", "--calibration-length", "256")  # speed does not depend on the codes


def main() -> int:
    """Convert, time in turns, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="k", choices=list(GROUP_SIZES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    checkpoint = Path(said_by("bench.models", asked.model))
    prompt = [int(i) for i in load_tokenizer(checkpoint)(PROMPT)["input_ids"]]
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="quantkit-decode-") as folder:
        models = {"bfloat16 transformers": opened(checkpoint, "transformers")}
        for name, (method, *options) in CONVERSIONS.items():
            out = Path(folder) / name
            group = ("--group-size", str(GROUP_SIZES[asked.model]))
            text = ("--calibration-text", str(calibration_text()))
            convert = (str(Path(sys.executable).parent / "quantkit"), "convert", str(checkpoint), "--method", method)
            subprocess.run([*convert, *options, *group, *text, *FEW, "--out", str(out)], check=True)
            models[name] = opened(out, "reference")
        times: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(asked.repeats + 1):  # the first is the warm-up
            for name, model in models.items():
                took = per_token_ms(model, prompt, asked.tokens)
                if turn:
                    times[name].append(took)
    figures = {name: statistics.median(found) for name, found in times.items()}
    base = figures["bfloat16 transformers"]
    for name, value in figures.items():
        print(f"{name:22} {value:7.2f} ms/token  {value / base:.3f}x")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "decode.json").write_text(
        json.dumps({"model": checkpoint.name, "threads": 1, "ms_per_token": times, "median": figures}, indent=2) + "\n",
        encoding="utf-8",
    )
    missed = [name for name in CONVERSIONS if figures[name] > TARGET * base]
    for name in missed:
        print(f"MISSED {name}: {figures[name] / base:.3f}x of bfloat16 transformers' time, at most {TARGET}x")
    return 1 if missed else 0


def opened(path: Path, engine: str) -> LoadedModel:
    """A checkpoint or artifact, opened for one thread."""
    return find_engine(engine).load(open_model(str(path)), LoadSpec(threads=1, n_ctx=512))


def per_token_ms(model: LoadedModel, prompt: list[int], tokens: int) -> float:
    """Milliseconds between the first and the last of `tokens` new tokens, by token."""
    stamps = [time.perf_counter() for _ in model.stream(prompt, tokens)]
    return (stamps[-1] - stamps[0]) * 1000 / (len(stamps) - 1)


if __name__ == "__main__":
    sys.exit(main())
