"""What a checkpoint with Llama-2-7B's shapes takes to convert and to judge under a hard limit of memory.

Each row is one command. It and every process that it starts get RLIMIT_AS, a limit of addresses: whatever is allocated
or mapped counts, also what is never touched, and files that are read through memory. Judged are 2 windows of 512 tokens
with divergence from the source, whose baseline the first row computes. Weights are random.

Writes bench/results/limited.json; exit code 1 where a command fails, or its peak of resident memory grows by more than
a tenth with the blocks. 32 blocks take 13.5 GB of disk, and the largest artifact as much again beside it for a while.

python -m bench.limited [--blocks 8 32] [--limit-gb 6] [--rows source gguf judged-gguf nf4 ctranslate2] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.folders import REPOSITORY, RESULTS
from bench.measure import Run, run

TEXT = REPOSITORY / "quantkit" / "data" / "sample_articles.txt"
# Few blocks would be judged whole where so much is free; the forecast leads many and few to the same walk.
WINDOWS = ("--limit", "2", "--n-ctx", "512", "--text", str(TEXT), "--max-memory-gb", "3")
# @source is the checkpoint, @ROW what the row makes.
ROWS: dict[str, tuple[str, ...]] = {
    "source": ("eval-ppl", "@source", *WINDOWS),
    "gguf": ("convert", "@source", "--method", "gguf", "--bits", "Q4_K_M", "--out", "@gguf"),
    "judged-gguf": ("eval-ppl", "@gguf", "--engine", "reference", "--source", "@source", *WINDOWS),
    "nf4": ("convert", "@source", "--method", "nf4", "--out", "@nf4"),
    "ctranslate2": ("convert", "@source", "--method", "ctranslate2", "--bits", "int8", "--out", "@ctranslate2"),
}
LIMIT_S = 6 * 3600.0
GROWTH = 1.1
GB = 1e9


def command_of(row: str, source: Path, folder: Path, threads: int) -> list[str]:
    """The command of a row on the checkpoint `source` and the artifacts in `folder`."""
    places = {f"@{name}": str(folder / name) for name in ROWS} | {"@source": str(source)}
    words = [places.get(word, word) for word in ROWS[row]]
    judging = ["--threads", str(threads)] if words[0] == "eval-ppl" and threads else []
    return [sys.executable, "-m", "quantkit", *words, *judging]


def measured(row: str, blocks: int, done: Run) -> dict[str, Any]:
    """The figures of a command that ended."""
    figures = {"peak_gb": done.peak_gb, "together_gb": done.together_gb, "cpu_s": done.cpu_s, "wall_s": done.wall_s}
    return {"row": row, "blocks": blocks} | {name: round(value, 2) for name, value in figures.items()}


def grown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows whose peak is more than a tenth above that of fewer blocks."""
    lines = []
    for name in dict.fromkeys(row["row"] for row in rows):
        peaks = {row["blocks"]: row["peak_gb"] for row in rows if row["row"] == name}
        few = min(peaks)
        lines += [
            f"{name}: the peak grows with the blocks, {peaks[few]} GB of {few} and {peak} GB of {blocks}"
            for blocks, peak in peaks.items()
            if peak > GROWTH * peaks[few]
        ]
    return lines


def main() -> int:
    """Run every row at each number of blocks, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--limit-gb", type=float, default=6.0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--work", type=Path, help="make the checkpoints here, and leave them for another run")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    for blocks in asked.blocks:
        with tempfile.TemporaryDirectory(dir=asked.work) as work:
            folder = Path(work)
            source = folder / "source" if asked.work is None else asked.work / f"source-{blocks}"
            if not source.exists():
                making = ["-m", "bench.memory", "--make", str(folder / "making"), "--blocks", str(blocks)]
                subprocess.run([sys.executable, *making], check=True, cwd=REPOSITORY)
                (folder / "making").rename(source)
            variables = os.environ | {"QUANTKIT_CACHE": str(folder / "cache")}
            variables |= {"OMP_NUM_THREADS": str(asked.threads)} if asked.threads else {}
            for row in asked.rows:
                command = command_of(row, source, folder, asked.threads)
                done = run(command, variables, folder / "log", LIMIT_S, REPOSITORY, int(asked.limit_gb * GB))
                if done.code:
                    missed.append(f"{row}, {blocks} blocks: {done.reason}")
                    print(done.output)
                rows.append(measured(row, blocks, done) | {"ended_well": not done.code})
                print(rows[-1], flush=True)
                if row in ("judged-gguf", "nf4", "ctranslate2"):
                    shutil.rmtree(folder / row.removeprefix("judged-"), ignore_errors=True)
    missed += grown([row for row in rows if row["ended_well"]])
    RESULTS.mkdir(parents=True, exist_ok=True)
    limit = {"limit": "RLIMIT_AS of each process", "limit_gb": asked.limit_gb}
    (RESULTS / "limited.json").write_text(json.dumps(limit | {"rows": rows, "missed": missed}, indent=2))
    for line in missed:
        print("MISSED", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
