"""Damage inputs of every kind, and count what quantkit does with them.

Each case is drawn from the seed, its kind and its number, whatever else runs: `--case KIND:NUMBER -v` runs one again
and shows everything. Prints a table of kinds and outcomes; exit code 1 where an outcome is bad.

python -m bench.fuzz [--seed 1] [--cases 3000] [--jobs 1] [--kinds config.json,recipe] [--case config.json:17 -v]
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bench.fuzz import bases, children
from bench.fuzz.case import Case
from bench.fuzz.judges import Unjudged
from bench.fuzz.kinds import KINDS
from bench.fuzz.mutations import Damage
from bench.fuzz.outcomes import COLUMNS, Outcome, outcome_of

ATTEMPTS = 20  # to draw a damage that changes a byte


def case_work(seed: int, kind: str, number: int, bases: Path, sound: bool) -> Callable[[children.Child], None]:
    """What the child of a case does: damage, run, judge."""

    def work(child: children.Child) -> None:
        here = Path.cwd()
        for attempt in range(ATTEMPTS):
            draw = random.Random(f"{seed} {kind} {number} {attempt}")
            case = Case(draw, Damage(draw), here, bases, sound)
            attack = KINDS[kind](case)
            if not case.same:
                break
            children.clear(here)
        before = [path.relative_to(here).as_posix() for path in here.rglob("*")]
        child.note(notes=case.damage.notes, arguments=attack.arguments, before=before, same=case.same)
        if case.same:
            return
        children.run_in(child, attack.arguments, attack.call)
        if child.known["code"] or child.known["trace"]:
            return
        if attack.judge is None:
            child.note(judged=None)
            return
        child.note(judging=True)
        try:
            child.note(judged=attack.judge())
        except Unjudged:
            child.note(judged=None)

    return work


def numbered(kinds: list[str], count: int) -> Iterator[tuple[str, int]]:
    """`count` cases, shared out among the kinds."""
    for number in range(count):
        yield kinds[number % len(kinds)], number // len(kinds)


def run(
    seed: int, cases: list[tuple[str, int]], jobs: int, folder: Path, sound: bool = False
) -> Iterator[tuple[str, int, Outcome, children.Ended, Path]]:
    """Run the cases; yield each with its outcome. `folder` holds the sound inputs that `prepare` made."""

    def tasks() -> Iterator[tuple[tuple[str, int], Path, Callable[[children.Child], None]]]:
        for kind, number in cases:
            place = folder / "cases" / f"{kind}-{number}"
            yield (kind, number), place, case_work(seed, kind, number, folder, sound)

    for (kind, number), place, ended in children.run_all(tasks(), jobs):
        yield kind, number, outcome_of(ended, place), ended, place
        children.remove(place)


def prepare(folder: Path, jobs: int, kinds: Iterable[str]) -> None:
    """Import what will be needed, and make the sound inputs that `kinds` need below `folder`."""
    from bench.fuzz.zygote import get_ready

    get_ready()
    bases.build(folder, jobs, kinds)


def table(counts: dict[str, collections.Counter[str]]) -> str:
    """Kinds and outcomes in Markdown."""
    lines = ["| input | cases | " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) + 1)]
    total: collections.Counter[str] = collections.Counter()
    for kind, counter in counts.items():
        total.update(counter)
        lines.append(_row(kind, counter))
    return "\n".join([*lines, _row("all", total)])


def _row(name: str, counter: collections.Counter[str]) -> str:
    cells = [sum(counter[column] for column in COLUMNS), *(counter[column] for column in COLUMNS)]
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


def main() -> int:
    """Run, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--kinds", help="comma-separated; default: all")
    parser.add_argument("--case", action="append", default=[], help="KIND:NUMBER, the only one to run; may be repeated")
    parser.add_argument("--sound", action="store_true", help="damage no file: are the judges right?")
    parser.add_argument("-v", "--verbose", action="store_true", help="show every case, its damage and what was said")
    asked = parser.parse_args()
    kinds = asked.kinds.split(",") if asked.kinds else list(KINDS)
    cases = [(kind, int(number)) for kind, _, number in (case.rpartition(":") for case in asked.case)]
    cases = cases or list(numbered(kinds, asked.cases))
    counts: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind, _ in cases}
    cpu: collections.Counter[str] = collections.Counter()
    began, bad = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="quantkit-fuzz-") as name:
        folder = Path(name)
        prepare(folder, asked.jobs, counts)
        ready = time.monotonic()
        for kind, number, outcome, ended, _ in run(asked.seed, cases, asked.jobs, folder, asked.sound):
            counts[kind][outcome.name] += 1
            cpu[kind] += ended.cpu_seconds
            bad += outcome.bad
            if outcome.bad or asked.verbose:
                _show(kind, number, outcome, ended)
    print(table(counts))
    if asked.verbose:
        print("\nCPU seconds a case: " + ", ".join(f"{kind} {cpu[kind] / counts[kind].total():.2f}" for kind in counts))
    end = time.monotonic()
    took = f"{len(cases)} cases in {end - ready:.0f} s, after {ready - began:.0f} s for sound inputs"
    print(f"\nseed {asked.seed}: {took}; {bad} bad")
    return int(bad > 0)


def _show(kind: str, number: int, outcome: Outcome, ended: children.Ended) -> None:
    result = ended.result
    print(f"{outcome.name} {kind}:{number} ({ended.seconds:.1f} s, {ended.peak_bytes / 1e9:.2f} GB)")
    print(f"  damage: {'; '.join(result.get('notes', ['?']))[:1000]}")
    print(f"  command: quantkit {' '.join(result.get('arguments', ['?']))[:1000]}")
    print("  " + outcome.reason.replace("\n", "\n  ")[:6000], flush=True)


if __name__ == "__main__":
    sys.exit(main())
