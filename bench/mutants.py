"""Deliberate errors in the code, each of which has to be seen by the tests that are named for it.

`bench/mutants/*.yaml` are lists of entries: `kind` (what the error is), `file`, `old` (a text that the file has exactly
once), `new`, and `tests` (what pytest is given). The tree is copied, all named tests have to pass there; then one entry
after the other is put in, its tests run, and the file is put right. Killed is an error that a test fails at. Exit code
1 unless all are killed.

python -m bench.mutants [--only judging] [--only "cost x 60"] [--jobs 1] [--list]
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.folders import REPOSITORY, BenchError

ENTRIES = REPOSITORY / "bench" / "mutants"
FIELDS = {"kind": str, "file": str, "old": str, "new": str, "tests": list}
LEFT_OUT = (".venv", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__", "demo-output", "results")
LIMIT = 900  # seconds for the tests of one entry
KILLED, SURVIVED, BROKEN = "killed", "SURVIVED", "the change cannot be loaded or run"
NOT_FOUND, RED_BEFORE, ENDLESS = "text not found", "tests fail without the change", f"no end within {LIMIT} s"
# pytest's exit codes: 1 tests failed; 2 and 4 nothing could be collected.
OUTCOMES = {0: SURVIVED, 1: KILLED}
Outcome = tuple[str, list[str]]


@dataclass(frozen=True)
class Mutant:
    """One deliberate error; `group` is the name of the YAML file that it is in."""

    group: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def count(self, tree: Path) -> int:
        """How often the file has the text."""
        path = tree / self.file
        return path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0

    @contextmanager
    def in_place(self, tree: Path) -> Iterator[None]:
        """Put the error into a copy of the tree, and take it out."""
        path = tree / self.file
        right = path.read_text(encoding="utf-8")
        _write(path, right.replace(self.old, self.new))
        try:
            yield
        finally:
            _write(path, right)


def _write(path: Path, text: str) -> None:
    """Write a module. Of the same length, and within the same second, its bytecode would pass for that of the text."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def read(folder: Path) -> list[Mutant]:
    """All entries; raises BenchError where one is not whole."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        for number, values in enumerate(yaml.safe_load(path.read_text(encoding="utf-8")) or []):
            wrong = _wrong(values)
            if wrong:
                raise BenchError(f"{path.name}, entry {number + 1}: {wrong}")
            found.append(Mutant(path.stem, **{**values, "tests": tuple(values["tests"])}))
    return found


def _wrong(values: Any) -> str:
    if not isinstance(values, dict) or set(values) != set(FIELDS):
        return f"it has to have the keys {', '.join(FIELDS)}"
    for name, kind in FIELDS.items():
        if not isinstance(values[name], kind) or (name != "new" and not values[name]):
            return f"{name} = {values[name]!r} is no {kind.__name__} with something in it"
    return "old and new are the same" if values["old"] == values["new"] else ""


def copied(place: Path) -> Path:
    """A copy of the repository in `place`, with the shared data beside it."""
    tree = place / "tree"
    shutil.copytree(REPOSITORY, tree, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    shared = REPOSITORY.parent / "shared"
    if shared.is_dir():
        (place / "shared").symlink_to(shared)
    return tree


def run_tests(tree: Path, tests: tuple[str, ...], limit: float = LIMIT) -> Outcome:
    """What becomes of the tests in a copy: one of the outcomes, and the lines that name what failed."""
    env = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return ENDLESS, []
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return OUTCOMES.get(done.returncode, BROKEN), failed or done.stdout.splitlines()[-1:]


def judge(mutant: Mutant, tree: Path) -> Outcome:
    """The outcome of one entry in a copy of the tree."""
    with mutant.in_place(tree):
        return run_tests(tree, mutant.tests)


def main() -> int:
    """Run, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a YAML file's name, or a part of a kind")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree that are worked on at once")
    parser.add_argument("--list", action="store_true", help="print kinds and tests, run nothing")
    asked = parser.parse_args()
    mutants = [m for m in read(ENTRIES) if not asked.only or any(o == m.group or o in m.kind for o in asked.only)]
    if not mutants:
        raise BenchError(f"no entry of {ENTRIES} is named so")
    if asked.list:
        for mutant in mutants:
            print(f"{mutant.group}: {mutant.kind} ({mutant.file})", *mutant.tests, sep="\n    ")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copies are removed
    place = Path(tempfile.mkdtemp(prefix="quantkit-mutants-"))
    try:
        return _run(mutants, place, max(1, min(asked.jobs, len(mutants))))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _run(mutants: list[Mutant], place: Path, jobs: int) -> int:
    trees: queue.Queue[Path] = queue.Queue()
    for number in range(jobs):
        trees.put(copied(place / str(number)))
    counts: dict[str, int] = {}

    def worked(action: Any, *arguments: Any) -> Any:
        tree = trees.get()
        try:
            return action(*arguments, tree)
        finally:
            trees.put(tree)

    def told(mutant: Mutant, outcome: str, lines: list[str]) -> None:
        counts[outcome] = counts.get(outcome, 0) + 1
        print(f"{outcome}: {mutant.group}: {mutant.kind} ({mutant.file})", flush=True)
        for line in lines if outcome == KILLED else (*lines, *mutant.tests):
            print(f"    {line[:200]}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        first = place / "0" / "tree"
        found = [m for m in mutants if m.count(first) == 1]
        for mutant in mutants:
            if mutant not in found:
                told(mutant, NOT_FOUND, [f"{mutant.file} has it {mutant.count(first)} times"])
        before = _quiet(
            [m.tests for m in found], first, lambda tests: worked(lambda tree: run_tests(tree, tests)), pool
        )
        for mutant in found:
            if before[mutant.tests][0] != SURVIVED:
                told(mutant, RED_BEFORE, before[mutant.tests][1])
        found = [m for m in found if before[m.tests][0] == SURVIVED]
        for mutant, (outcome, lines) in zip(
            found, pool.map(lambda m: worked(lambda tree: judge(m, tree)), found), strict=True
        ):
            told(mutant, outcome, lines)
    print(f"{len(mutants)} errors: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(counts.get(KILLED, 0) != len(mutants))


def _quiet(
    sets: list[tuple[str, ...]], tree: Path, run: Callable[[tuple[str, ...]], Outcome], pool: ThreadPoolExecutor
) -> dict[tuple[str, ...], Outcome]:
    """What becomes of each entry's tests without its error: of all at once, and one by one where that is red."""
    sets = list(dict.fromkeys(sets))
    every = tuple(dict.fromkeys(test for tests in sets for test in tests))
    if sets and run_tests(tree, every, LIMIT * len(sets))[0] == SURVIVED:
        return dict.fromkeys(sets, (SURVIVED, []))
    return dict(zip(sets, pool.map(run, sets), strict=True))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"error: {error}")
