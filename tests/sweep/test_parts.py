"""Parts of a sweep: what is measured on named machines, and what is not taken for done."""

from pathlib import Path
from typing import Any

import pytest
from test_sweep import SETTINGS, Here, models, recipe_of
from tiny_models import EVALUATION

from quantkit.errors import RecipeError, ReportError
from quantkit.recipe import SweepRecipe, parse
from quantkit.report.records import Hardware
from quantkit.report.sheet import read_places
from quantkit.sweep import run as sweeps
from quantkit.sweep.run import Outcome
from quantkit.sweep.tasks import lines_of, plan

__all__ = ["models"]
WINDOWS = {**EVALUATION, "limit": 70, "probes": ("size", "perplexity")}
FAST = {**EVALUATION, "probes": ("size", "speed", "perplexity"), "new_tokens": 2, "repeats": 1}


def recipe(places: list[Path], out: Path, variants: tuple[str, ...] = ("rtn:4",), **changes: Any) -> SweepRecipe:
    values = recipe_of(places, list(variants), out).model_dump() | changes
    return parse(SweepRecipe, values, "a recipe")


def done(given: SweepRecipe, **named: Any) -> tuple[Outcome, list[str], Here]:
    executor = Here(**named)
    outcome = sweeps.run(given, executor)
    assert outcome.failed == {}
    return outcome, executor.begun, executor


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"machines": ["laptop"]}, "the probes size, perplexity measure no machine"),
        ({"machines": ["a b", "A-b"], "evaluation": FAST}, "two have the same name"),
    ],
)
def test_idle_settings_are_refused_before_the_work(
    changes: dict[str, Any], words: str, models: list[Path], tmp_path: Path
) -> None:
    executor = Here()
    with pytest.raises(RecipeError, match=words):
        sweeps.run(recipe(models[:1], tmp_path / "out", **changes), executor)
    assert executor.begun == []


def test_speed_is_measured_on_each_machine_and_quality_once(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = recipe(models[:1], tmp_path / "out", machines=("laptop", "big server"), evaluation=FAST)
    outcome, begun, executor = done(given, machines=frozenset({"laptop"}))
    assert begun == ["one.source", "one.source@laptop", "one.rtn-4.convert", "one.rtn-4", "one.rtn-4@laptop"]
    assert {name for name, needs in executor.needs.items() if needs.alone} == {"one.source@laptop", "one.rtn-4@laptop"}
    assert executor.needs["one.rtn-4@laptop"].machine == "laptop"
    assert outcome.waiting == {"big server": ("one.source@big-server", "one.rtn-4@big-server")}
    assert outcome.sheet is not None
    assert outcome.sheet.notes()[0].startswith("Not measured yet: 2 tasks wait for the machine big server;")
    waiting = "one.rtn-4@big-server: waiting (for the machine big server)"
    assert waiting in lines_of(tmp_path / "out")
    outcome, begun, _ = done(given, machines=frozenset({"big server"}))
    assert begun == ["one.source@big-server", "one.rtn-4@big-server"]
    assert outcome.waiting == {}
    assert outcome.sheet is not None
    titles = [row.title for row in outcome.sheet.rows("one")]
    speeds = [title for title in titles if title.startswith("ms/token")]
    assert speeds == ["ms/token @ 1 thread, laptop", "ms/token @ 1 thread, big server"]
    assert titles.count("perplexity") == 1
    for row in outcome.sheet.rows("one"):
        assert "-" not in row.cells, row.title
    assert done(given)[1] == []  # what other machines have measured is known by their word
    assert [machine for machine, _ in read_places([str(tmp_path / "out")])][1:] == ["laptop", "big server"]
    with pytest.raises(ReportError, match="holds tables of several machines"):
        read_places([f"other={tmp_path / 'out'}"])
    hardware = Hardware(cpu="Other CPU", cores=64, memory_bytes=1 << 40)
    monkeypatch.setattr("quantkit.evaluation.evaluate.this_machine", lambda: hardware)
    assert done(given, machines=frozenset({"laptop"}))[1] == ["one.source@laptop", "one.rtn-4@laptop"]


def test_what_a_share_left_of_another_recipe_stands_in_no_table(models: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done(recipe(models[:1], out, ("rtn:4", "rtn:8")))
    changed = recipe(models[:1], out, ("rtn:4", "rtn:8"), evaluation={**SETTINGS["evaluation"], "new_tokens": 3})
    outcome = sweeps.run(changed, Here(), shard=(0, 2))
    assert outcome.sheet is not None
    assert [report.model.label for report in outcome.sheet.reports("one")] == ["bfloat16", "rtn-4"]
    assert any(line.startswith("one.rtn-8: waiting (it was done before as") for line in lines_of(out))


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
    for changes in (
        {"evaluation": WINDOWS},
        {"seed": 1},
        {"calibration": {"sequences": 4}},
    ):
        assert not set(digests(**changes)) & set(same)
