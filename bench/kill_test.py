"""Random SIGKILLs over a conversion, each followed by the same command again: are the bytes those of a quiet run?

One conversion runs undisturbed and is timed. Then processes of the same command are killed, each at a random moment
of that time, until `--kills` kills have hit; whenever an artifact is finished its hash is compared and the next one is
begun. Prints the kills, at which block each hit, and the hashes. Exit code 1 where a hash differs.

python -m bench.kill_test [--model demo] [--method gptq] [--kills 20] [--seed 0] [--sequences 8]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoints.journal import read_journal
from quantkit.conversion.staging import OWNER, partial_of
from quantkit.conversion.verify import verify
from quantkit.system.files import sha256_of


def digest(folder: Path) -> str:
    """sha256 over the names and sha256 of all files of a folder."""
    lines = [f"{path.relative_to(folder)} {sha256_of(path)}" for path in sorted(folder.rglob("*")) if path.is_file()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Conversion:
    """The command line without its output folder."""

    arguments: tuple[str, ...]

    def start(self, out: Path) -> subprocess.Popen[bytes]:
        """Start it; return when it has begun to write."""
        command = [sys.executable, "-m", "quantkit.cli", "convert", *self.arguments, "--out", str(out)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        owner = partial_of(out) / OWNER
        while process.poll() is None and not (owner.is_file() and owner.read_text() == str(process.pid)):
            time.sleep(0.005)
        return process


def main() -> int:
    """Run, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=8)
    asked = parser.parse_args()
    conversion = Conversion((asked.model, "--method", asked.method, "--calibration-sequences", str(asked.sequences)))
    folder = Path(tempfile.mkdtemp(prefix="quantkit-kills-"))
    try:
        return _disturb(conversion, folder, asked.kills, random.Random(asked.seed))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _disturb(conversion: Conversion, folder: Path, kills: int, draw: random.Random) -> int:
    quiet = folder / "quiet"
    process, began = conversion.start(quiet), time.monotonic()
    if process.wait() != 0:
        return 1
    seconds, expected = time.monotonic() - began, digest(quiet)
    print(f"undisturbed: {seconds:.0f} s, sha256 {expected}", flush=True)
    hit, artifacts, wrong = 0, 0, 0
    while hit < kills or artifacts == 0:
        out = folder / f"killed-{artifacts}"
        here = 0
        while not out.exists():
            process = conversion.start(out)
            if hit < kills:
                time.sleep(draw.uniform(0, seconds))
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            if code not in (0, -signal.SIGKILL):
                print(f"the command ended with code {code}", flush=True)
                return 1
            if code == -signal.SIGKILL:
                hit, here = hit + 1, here + 1
                blocks = len(read_journal(partial_of(out))[0]) if partial_of(out).is_dir() else "all"
                print(f"kill {hit}: {blocks} blocks were finished", flush=True)
        artifacts += 1
        verify(out)
        found = digest(out)
        wrong += found != expected
        same = "the same" if found == expected else "DIFFERENT"
        print(f"artifact {artifacts}, killed {here} times: sha256 {found}, {same}", flush=True)
        shutil.rmtree(out)
    print(f"{hit} kills, {artifacts} artifacts, {artifacts - wrong} of them byte for byte the undisturbed one")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
