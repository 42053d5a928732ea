"""Random SIGKILLs over conversions, evaluations and comparisons, each followed by the same command again.

Every command runs undisturbed first and is timed. Then processes of it are killed, each at a random moment of that
time, until `--kills` have hit over all of them; whenever one comes to its end, its artifact has to be byte for byte
the undisturbed one, and its figures (but times and memory) have to be equal. Prints every kill and what came of it.
Exit code 1 where anything differs.

python -m bench.kill_test [--model demo] [--only gptq,awq,...] [--kills 40] [--seed 0] [--sequences 8]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoints.spool import read_journal
from quantkit.conversion.convert import convert
from quantkit.conversion.staging import OWNER, partial_of
from quantkit.conversion.verify import verify
from quantkit.system.files import sha256_of

SAMPLE = Path(__file__).parents[1] / "quantkit" / "data" / "sample_articles.txt"
CONVERSIONS = {
    "gptq": (),
    "awq": (),
    "rtn": (),
    "nf4": (),
    "float": (),
    "ctranslate2": (),
    "gguf": ("--bits", "Q4_K_M"),
    "gguf with error feedback": ("--bits", "Q4_K_M", "--rounding", "gptq"),
}
TIMED = ("ms_per_token", "ttft_ms", "tokens_per_second", "pp", "tg", "peak_rss_bytes", "device_peak_bytes", "cost")
COMPARED = ("gptq:4", "gguf:Q4_K_M")


@dataclass(frozen=True)
class Trial:
    """A command: `arguments(out)`, when it has `begun(out, pid)`, and the `digest(out)` of what came of it."""

    name: str
    arguments: Callable[[Path], list[str]]
    digest: Callable[[Path], str]
    begun: Callable[[Path, int], bool] = lambda _out, _pid: True
    state: Callable[[Path], str] = lambda _out: ""
    whole: Callable[[Path], bool] = lambda _out: False  # a kill came too late: there is nothing left to do

    def start(self, out: Path, log: Path) -> subprocess.Popen[bytes]:
        """Start it; return when it has begun."""
        command = [sys.executable, "-m", "quantkit", *self.arguments(out)]
        environment = {**os.environ, "QUANTKIT_CACHE": str(out.with_suffix(".cache"))}
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, env=environment)
        while process.poll() is None and not self.begun(out, process.pid):
            time.sleep(0.002)
        return process


def digest_of_files(folder: Path) -> str:
    """sha256 over the names and sha256 of all files of an artifact, which has to verify."""
    verify(folder)
    lines = [f"{path.relative_to(folder)} {sha256_of(path)}" for path in sorted(folder.rglob("*")) if path.is_file()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _digest_of_figures(path: Path) -> str:
    values = json.loads(path.read_text(encoding="utf-8"))
    figures = [
        (report["model"]["label"], m["name"], m["value"], m["stderr"])
        for report in values.get("reports", [values])
        for m in report["measurements"]
        if not m["name"].startswith(TIMED)
    ]
    assert len(figures) > 2, figures
    return hashlib.sha256(json.dumps(figures).encode()).hexdigest()


def _digest_of_comparison(out: Path) -> str:
    artifacts = [digest_of_weights(path.parent) for path in sorted(out.rglob("quantkit.json"))]
    return hashlib.sha256("\n".join([_digest_of_figures(out / "table.json"), *artifacts]).encode()).hexdigest()


def digest_of_weights(folder: Path) -> str:
    """sha256 over an artifact's files but its card and manifest, which hold times there."""
    verify(folder)
    names = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in SPOKEN]
    return hashlib.sha256("\n".join(f"{path.name} {sha256_of(path)}" for path in names).encode()).hexdigest()


SPOKEN = ("README.md", "quantkit.json")


def _owned(out: Path, pid: int) -> bool:
    owner = partial_of(out) / OWNER
    return out.exists() or (owner.is_file() and owner.read_text() == str(pid))


def _blocks(out: Path) -> str:
    partial = partial_of(out)
    return f"{len(read_journal(partial)[0])} blocks were finished" if partial.is_dir() else "nothing was unfinished"


def trials(model: str, sequences: int, folder: Path) -> dict[str, Trial]:
    """All commands by name."""
    calibration = ["--calibration-text", str(SAMPLE), "--calibration-sequences", str(sequences)]
    evaluation = ["--text", str(SAMPLE), "--limit", "6", "--n-ctx", "128"]
    found = {}
    for name, options in CONVERSIONS.items():
        method = name.partition(" ")[0]
        start = ["convert", model, "--method", method, *options, *calibration]
        found[name] = Trial(
            name,
            lambda out, start=start: [*start, "--out", str(out)],
            digest_of_files,
            _owned,
            _blocks,
            Path.exists,
        )

    def judged() -> Path:
        artifact = folder / "judged"
        if not artifact.exists():
            convert(model, "rtn", out=artifact)
        return artifact

    found["eval-ppl"] = Trial(
        "eval-ppl",
        lambda out: ["eval-ppl", str(judged()), "--source", model, *evaluation, "--json", str(out)],
        _digest_of_figures,
    )
    variants = ["--methods", ",".join(COMPARED)]
    found["compare"] = Trial(
        "compare",
        lambda out: ["compare", model, *variants, *calibration, *evaluation, "--threads", "1", "--out", str(out)],
        _digest_of_comparison,
    )
    return found


def main() -> int:
    """Run, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", default="")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=8)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="quantkit-kills-"))
    draw = random.Random(asked.seed)
    try:
        known = trials(asked.model, asked.sequences, folder)
        chosen = [known[name] for name in (asked.only.split(",") if asked.only else known)]
        results = [_disturb(trial, folder, -(-asked.kills // len(chosen)), draw) for trial in chosen]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    hits, ended, wrong = (sum(column) for column in zip(*results, strict=True))
    print(f"{hits} kills, {ended} commands that came to their end after them, {wrong} of them with another result")
    return int(wrong > 0)


def _disturb(trial: Trial, folder: Path, kills: int, draw: random.Random) -> tuple[int, int, int]:
    """(kills that hit, commands that ended after kills, how many of these with another result)."""
    log, quiet = folder / "log", folder / "quiet"
    process, began = trial.start(quiet, log), time.monotonic()
    if process.wait() != 0:
        raise SystemExit(f"{trial.name}, undisturbed, ended with code {process.returncode}: {log.read_text()[-500:]}")
    seconds, expected = time.monotonic() - began, trial.digest(quiet)
    print(f"{trial.name}: undisturbed {seconds:.1f} s, {expected[:16]}", flush=True)
    hit, ended, wrong = 0, 0, 0
    while hit < kills:
        out = folder / f"killed-{ended}"
        while True:
            process, began = trial.start(out, log), time.monotonic()
            if hit < kills:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(draw.uniform(0, seconds))
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            if code == 0:
                seconds = min(seconds, time.monotonic() - began)
                break
            if code != -signal.SIGKILL:
                raise SystemExit(f"{trial.name} ended with code {code}: {log.read_text()[-500:]}")
            hit += 1
            print(f"  kill {hit}: {trial.state(out)}".rstrip(": "), flush=True)
            if trial.whole(out):
                break
        ended += 1
        found = trial.digest(out)
        wrong += found != expected
        print(f"  ended: {'the same' if found == expected else 'DIFFERENT'} {found[:16]}", flush=True)
        left = [path.name for path in folder.glob(f"{out.name}.partial*")]
        if left:
            print(f"  LEFT BEHIND: {', '.join(left)}", flush=True)
            wrong += 1
    for path in folder.glob("killed-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in folder.glob("quiet*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return hit, ended, wrong


if __name__ == "__main__":
    sys.exit(main())
