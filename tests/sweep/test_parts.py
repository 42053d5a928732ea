"""Tasks of a sweep: what they ask for, and what is taken for done."""

from pathlib import Path
from typing import Any

from test_sweep import Here, models, recipe_of
from tiny_models import EVALUATION

from quantkit.recipe import SweepRecipe, parse
from quantkit.report.records import Hardware
from quantkit.sweep import run as sweeps
from quantkit.sweep.run import Outcome
from quantkit.sweep.tasks import plan

__all__ = ["models"]
WINDOWS = {**EVALUATION, "limit": 70, "probes": ("size", "perplexity")}


def recipe(places: list[Path], out: Path, variants: tuple[str, ...] = ("rtn:4",), **changes: Any) -> SweepRecipe:
    values = recipe_of(places, list(variants), out).model_dump() | changes
    return parse(SweepRecipe, values, "a recipe")


def done(given: SweepRecipe, **named: Any) -> tuple[Outcome, list[str], Here]:
    executor = Here(**named)
    outcome = sweeps.run(given, executor)
    assert outcome.failed == {}
    return outcome, executor.begun, executor


def test_figures_of_quality_are_used_again_on_another_machine_and_speeds_are_not(
    models: list[Path], tmp_path: Path, monkeypatch: Any
) -> None:
    fast = {**EVALUATION, "limit": 1, "probes": ("speed",), "new_tokens": 2, "repeats": 1}
    quality, speed = recipe(models[:1], tmp_path / "quality"), recipe(models[:1], tmp_path / "speed", evaluation=fast)
    for given in (quality, speed):
        done(given)
    hardware = Hardware(cpu="Other CPU", cores=64, memory_bytes=1 << 40)
    monkeypatch.setattr("quantkit.evaluation.evaluate.this_machine", lambda: hardware)
    assert done(quality)[1] == []
    assert done(speed)[1] == ["one.source", "one.rtn-4"]


def test_each_task_asks_for_the_memory_of_its_forecast(models: list[Path], tmp_path: Path) -> None:
    _, _, executor = done(recipe(models[:1], tmp_path / "out", ("gptq:4",), evaluation=WINDOWS))
    memory = {name: needs.memory for name, needs in executor.needs.items()}
    assert all(amount is not None and 5e8 < amount < 5e9 for amount in memory.values()), memory


def test_a_digest_is_of_all_that_decides_a_task_s_result(models: list[Path], tmp_path: Path) -> None:
    def digests(**changes: Any) -> list[str]:
        return [task.digest for task in plan(recipe(models[:1], tmp_path, **changes), tmp_path)]

    same = digests()
    assert len(set(same)) == 3
    assert [task.digest for task in plan(recipe(models[:1], tmp_path), tmp_path / "moved")] == same
    for changes in ({"evaluation": WINDOWS}, {"seed": 1}, {"calibration": {"sequences": 4}}):
        assert not set(digests(**changes)) & set(same)
