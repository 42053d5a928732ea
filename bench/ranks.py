"""`make bench-ranks`: two processes that share one model, beside one process, each rank on one thread.

GPTQ of a measured model at its defaults, in one process and twice in two: wall seconds in turns, divergence of both
from the source, bytes of the two. Then one rank of a conversion is killed: how long the other lives, what is left, the
bytes of the same command again.
The exit code is 1 where a target is missed. Both cores have to be idle.

python -m bench.ranks [--model f] [--repeats 1] [--windows 64] [--only convert,kill]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.folders import RESULTS, calibration_text, evaluation_text
from bench.rows import GROUP_SIZES
from bench.run_peers import said_by
from quantkit.checkpoints.spool import read_journal
from quantkit.conversion.staging import partial_of
from quantkit.system.files import sha256_of

WALL, KLD, GONE_S = 0.6, 0.03, 10.0  # of one process's wall time; relative; seconds
ONE = [sys.executable, "-m", "quantkit"]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "quantkit"]
PARTS = ("convert", "kill")
KILLED_AFTER = 3  # finished blocks


@dataclass
class Bench:
    """A checkpoint, a folder for what is made of it, and what was measured and missed."""

    checkpoint: Path
    folder: Path
    repeats: int
    windows: int
    figures: dict[str, Any] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        """One thread, and a cache of its own, which has no baselines yet."""
        return {**os.environ, "OMP_NUM_THREADS": "1", "QUANTKIT_CACHE": str(self.folder / "cache")}

    def seconds(self, command: list[str]) -> float:
        """Wall seconds of a command that has to end well."""
        start = time.monotonic()
        subprocess.run(command, check=True, env=self.variables, stdout=subprocess.DEVNULL)
        return time.monotonic() - start

    def convert(self, out: Path) -> list[str]:
        """GPTQ at its defaults."""
        text = ("--calibration-text", str(calibration_text()))
        return ["convert", str(self.checkpoint), "--method", "gptq", "--bits", "4", *text, "--out", str(out)]

    def judge(self, artifact: Path, result: Path) -> list[str]:
        """Perplexity and divergence on one thread."""
        flags = ("--text", str(evaluation_text()), "--limit", str(self.windows), "--threads", "1")
        return ["eval-ppl", str(artifact), "--source", str(self.checkpoint), *flags, "--json", str(result)]

    def expect(self, what: str, value: float, most: float) -> None:
        """Print a figure beside its target."""
        print(f"{what}: {value:.4g}, at most {most:g}")
        self.figures[what] = value
        if value > most:
            self.missed.append(what)

    def require(self, what: str, holds: bool) -> None:
        """Print whether something holds that has to."""
        print(f"{what}: {'yes' if holds else 'NO'}")
        self.figures[what] = holds
        if not holds:
            self.missed.append(what)


def converted(bench: Bench) -> None:
    """Wall time of two processes and of one in turns, bytes of two runs, divergence."""
    times: dict[str, list[float]] = {"one": [], "two": []}
    for turn in range(bench.repeats):
        for name, start in (("one", ONE), ("two", TWO)):
            times[name].append(bench.seconds([*start, *bench.convert(bench.folder / f"{name}-{turn}")]))
            print(f"converting in {name}: {times[name][-1]:.1f} s")
    bench.figures["converting, seconds"] = times
    ratio = statistics.median(times["two"]) / statistics.median(times["one"])
    bench.expect("converting, of one process", ratio, WALL)
    bench.seconds([*TWO, *bench.convert(bench.folder / "again")])
    same = digests(bench.folder / "two-0") == digests(bench.folder / "again")
    bench.require("the same command in two gives the same bytes", same)
    klds = {}
    for name in ("one", "two"):
        bench.seconds([*ONE, *bench.judge(bench.folder / f"{name}-0", bench.folder / f"{name}.json")])
        klds[name] = measured(bench.folder / f"{name}.json")["kld"]["value"]
    bench.figures["KLD"] = klds
    print(f"KLD of one process {klds['one']:.5f}, of two {klds['two']:.5f}")
    bench.expect("KLD of two above that of one, relative", klds["two"] / klds["one"] - 1, KLD)


def killed(bench: Bench) -> None:
    """Kill each rank once; time the other's end, and hold the resumed bytes against undisturbed ones."""
    bench.seconds([*TWO, *bench.convert(bench.folder / "quiet")])
    for victim in (0, 1):
        out = bench.folder / f"killed-{victim}"
        agent = subprocess.Popen([*TWO, *bench.convert(out)], env=bench.variables, stderr=subprocess.PIPE)
        while len(read_journal(partial_of(out))[0]) < KILLED_AFTER:
            time.sleep(0.05)
        ranks = {int(process.environ()["RANK"]): process for process in psutil.Process(agent.pid).children()}
        ranks[victim].send_signal(signal.SIGKILL)
        start = time.monotonic()
        while ranks[1 - victim].is_running() and ranks[1 - victim].status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)
        bench.expect(f"seconds that a rank outlives rank {victim}", time.monotonic() - start, GONE_S)
        agent.communicate()
        blocks = len(read_journal(partial_of(out))[0])
        bench.require(f"no artifact, {blocks} blocks kept", not out.exists() and blocks >= KILLED_AFTER)
        again = subprocess.run(
            [*TWO, *bench.convert(out)], check=True, env=bench.variables, capture_output=True, text=True
        )
        bench.require("the same command goes on", f": {blocks} finished decoder blocks" in again.stderr)
        bench.require("and gives the undisturbed bytes", digests(out) == digests(bench.folder / "quiet"))


def measured(report: Path) -> dict[str, Any]:
    """A report's measurements by name."""
    return {entry["name"]: entry for entry in json.loads(report.read_text(encoding="utf-8"))["measurements"]}


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file."""
    return {path.name: sha256_of(path) for path in folder.iterdir()}


def main() -> int:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="f", choices=list(GROUP_SIZES))
    parser.add_argument("--checkpoint", type=Path, help="a folder instead of a measured model")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    asked = parser.parse_args()
    checkpoint = (asked.checkpoint or Path(said_by("bench.models", asked.model))).absolute()
    folder = Path(tempfile.mkdtemp(prefix="quantkit-ranks-"))
    bench = Bench(checkpoint, folder, asked.repeats, asked.windows)
    try:
        for name, part in zip(PARTS, (converted, killed), strict=True):
            if name in asked.only.split(","):
                part(bench)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    values = {"model": checkpoint.name, "figures": bench.figures, "missed": bench.missed}
    (RESULTS / "ranks.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    for what in bench.missed:
        print(f"MISSED {what}")
    return 1 if bench.missed else 0


if __name__ == "__main__":
    sys.exit(main())
