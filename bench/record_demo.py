"""Run recipes/demo.yaml and record its steps: what tests/cli/test_time_left.py replays.

    python -m bench.record_demo tests/cli/demo_run.jsonl

Each line is a change of a step: seconds since the start, the step's number, title, total, done, piece, ended. Changes
within `EVERY` seconds of the last one of the same step are left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from bench.folders import REPOSITORY
from quantkit.progress import Progress, Step
from quantkit.recipe import CompareRecipe, load_recipe
from quantkit.sweep.compare import run

EVERY = 2.0


def main() -> None:
    """Run and write."""
    begin = time.monotonic()
    numbers: dict[int, int] = {}
    last: dict[int, float] = {}
    lines: list[list[object]] = []

    def listen(step: Step) -> None:
        now = time.monotonic() - begin
        new = id(step) not in numbers
        number = numbers.setdefault(id(step), len(lines))
        outer = step.piece > 0
        if new or step.ended or outer or now - last[number] >= EVERY:
            lines.append([round(now, 1), number, step.name, step.total, step.done, step.piece, step.ended])
            last[number] = now
        if step.ended:
            del numbers[id(step)]

    with tempfile.TemporaryDirectory() as out:
        recipe = load_recipe(REPOSITORY / "recipes" / "demo.yaml")
        assert isinstance(recipe, CompareRecipe)
        run(recipe.model_copy(update={"out": out}), Progress(listen, print))
    text = "\n".join(json.dumps(line) for line in lines)
    Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
