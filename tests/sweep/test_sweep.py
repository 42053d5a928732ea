import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from edits import edit_json, put
from tiny_models import CALIBRATION, EVALUATION, save_tiny

from quantkit.errors import QuantkitError
from quantkit.progress import Progress
from quantkit.recipe import SweepRecipe, parse
from quantkit.report.page import find_artifacts
from quantkit.report.records import Hardware
from quantkit.report.table import read_places
from quantkit.sweep import run as sweeps
from quantkit.sweep.compare import compare, parse_variant
from quantkit.sweep.executor import Needs
from quantkit.sweep.local import Local
from quantkit.sweep.state import place_of
from quantkit.sweep.tasks import lines_of
from quantkit.sweep.work import carry_out

SETTINGS = {"calibration": CALIBRATION, "evaluation": {**EVALUATION, "probes": ("size", "perplexity")}}


@dataclass
class Here:
    """An executor that does a task in this process as soon as it is handed over."""

    slots: int = 1
    begun: list[str] = field(default_factory=list)
    ended: list[tuple[str, int]] = field(default_factory=list)
    needs: dict[str, Needs] = field(default_factory=dict)
    most_memory: int | None = None
    sets_apart: bool = False

    def refuse(self, needs):
        return None

    def submit(self, name, command, log, needs):
        self.needs[name] = needs
        assert command[1:4] == ["-m", "quantkit.cli", "sweep-task"]
        self.begun.append(name)
        code = 0
        try:
            carry_out(Path(command[4]), command[5], Progress())
        except (QuantkitError, OSError) as error:
            log.write_text(str(error), encoding="utf-8")
            code = 1
        self.ended.append((name, code))

    def finished(self):
        return self.ended.pop(0)

    def close(self):
        assert not self.ended


def recipe_of(models, variants, out):
    named = [parse_variant(variant) for variant in variants]
    values = {"models": [str(model) for model in models], "variants": named, "out": str(out), **SETTINGS}
    return parse(SweepRecipe, values, "a recipe")


def swept(models, variants, out, **named):
    executor = Here()
    outcome = sweeps.run(recipe_of(models, variants, out), executor, **named)
    return outcome, executor.begun


def figures(table):
    return {r.model.label: {m.name: (m.value, m.stderr) for m in r.measurements} for r in table.reports}


@pytest.fixture(scope="session")
def models(once):
    return [
        once("one", lambda folder: save_tiny(folder, num_hidden_layers=1)),
        once("two", lambda folder: save_tiny(folder, num_hidden_layers=1, intermediate_size=128)),
    ]


@pytest.fixture(scope="module")
def done(models, tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep") / "out"
    outcome, begun = swept(models, ["rtn:4", "rtn:8"], out)
    assert outcome.failed == {}
    assert begun == [
        *("one.source", "one.rtn-4.convert", "one.rtn-4", "one.rtn-8.convert", "one.rtn-8"),
        *("two.source", "two.rtn-4.convert", "two.rtn-4", "two.rtn-8.convert", "two.rtn-8"),
    ]
    return out


def test_its_figures_are_those_of_comparisons_to_the_last_digit(done, models, tmp_path):
    tables = {table.models[0]: table for _, table in read_places([str(done)])}
    compared = compare(str(models[0]), ["rtn:4", "rtn:8"], out=tmp_path / "one", **SETTINGS)
    assert figures(tables["one"]) == figures(compared)
    found, remarks = find_artifacts([str(done)])
    assert sorted(artifact.label for artifact in found.values()) == ["rtn-4", "rtn-4", "rtn-8", "rtn-8"]
    assert remarks == []
    assert {path.name for path in done.iterdir()} >= {"table.md", "table.csv", "table.json", "perplexity-size.svg"}


def test_what_is_done_is_not_done_again_and_what_is_new_is(done, models, tmp_path):
    outcome, begun = swept(models, ["rtn:4", "rtn:8"], done)
    assert (begun, outcome.failed) == ([], {})
    own = [Path(shutil.copytree(model, tmp_path / model.name)) for model in models]
    out = Path(shutil.copytree(done, tmp_path / "out", copy_function=shutil.copy2))
    edit_json(own[1] / "config.json", put("rms_norm_eps", value=1e-3))
    outcome, begun = swept(own, ["rtn:4", "gguf:Q8_0"], out)
    assert begun == [
        *("one.gguf-Q8_0.convert", "one.gguf-Q8_0"),
        *("two.source", "two.rtn-4.convert", "two.rtn-4", "two.gguf-Q8_0.convert", "two.gguf-Q8_0"),
    ]
    assert outcome.sheet.columns == ["bfloat16", "rtn-4", "gguf-Q8_0"]


def test_other_settings_are_done_anew(done, models, tmp_path):
    out = Path(shutil.copytree(done, tmp_path / "out", copy_function=shutil.copy2))
    group = {"method": "rtn", "bits": "4", "options": {"group_size": 32}}
    settings = {"evaluation": {**SETTINGS["evaluation"], "limit": 1}}
    for changes, want in (
        (settings, ["one.source", "one.rtn-4"]),
        ({**settings, "variants": [group]}, ["one.rtn-4-group_size-32.convert", "one.rtn-4-group_size-32"]),
        ({**settings, "seed": 1}, ["one.rtn-4.convert", "one.rtn-4"]),
    ):
        executor = Here()
        values = recipe_of(models[:1], ["rtn:4"], out).model_dump() | changes
        assert sweeps.run(parse(SweepRecipe, values, "a recipe"), executor).failed == {}
        assert executor.begun == want


def test_figures_of_quality_are_used_again_on_another_machine_and_speeds_are_not(models, tmp_path, monkeypatch):
    fast = {**EVALUATION, "limit": 1, "probes": ("speed",), "new_tokens": 2, "repeats": 1}
    quality, speed = (recipe_of(models[:1], ["rtn:4"], tmp_path / name) for name in ("quality", "speed"))
    speed = parse(SweepRecipe, speed.model_dump() | {"evaluation": fast}, "a recipe")
    first = Here()
    for given in (quality, speed):
        assert sweeps.run(given, first).failed == {}
    assert all(1e8 < (needs.memory or 0) < 5e9 for needs in first.needs.values()), first.needs  # as is forecast
    hardware = Hardware(cpu="Other CPU", cores=64, memory_bytes=1 << 40)
    monkeypatch.setattr("quantkit.evaluation.evaluate.this_machine", lambda: hardware)
    again = Here()
    sweeps.run(quality, again)
    assert again.begun == []
    sweeps.run(speed, again)
    assert again.begun == ["one.source", "one.rtn-4"]


def test_what_fails_is_told_and_stops_nothing_else(models, tmp_path):
    out = tmp_path / "out"
    blocked = out / "models" / "one" / "reports" / "rtn-4.json"
    blocked.mkdir(parents=True)  # where the report is to lie: found out by the task
    outcome, begun = swept(models[:1], ["rtn:4", "rtn:8"], out)
    assert list(outcome.failed) == ["one.rtn-4"]
    assert begun[-3:] == ["one.rtn-4", "one.rtn-8.convert", "one.rtn-8"]
    assert f"log: {place_of(out, 'one.rtn-4').log}" in outcome.sheet.notes()[0]
    assert outcome.sheet.notes()[0].startswith("Not measured: one.rtn-4: ")
    assert [r.model.label for r in outcome.sheet.variants("one")] == ["bfloat16", "rtn-8"]
    assert any(line.startswith("one.rtn-4: failed: ") for line in lines_of(out))
    blocked.rmdir()
    outcome, begun = swept(models[:1], ["rtn:4", "rtn:8"], out)
    assert (outcome.failed, begun) == ({}, ["one.rtn-4"])


def test_what_no_method_can_do_is_told_before_the_work(models, tmp_path):
    narrow = save_tiny(tmp_path / "narrow", hidden_size=96, intermediate_size=160, num_hidden_layers=1)
    variant = {"method": "rtn", "bits": "4", "options": {"group_size": 128}}
    outcome, begun = swept([models[0], narrow], [variant], tmp_path / "out")
    label = "rtn-4 group_size=128"
    assert [name.split(".")[0] for name in outcome.failed] == ["narrow", "narrow"]
    assert all("group" in reason and "narrow" in name for name, reason in outcome.failed.items())
    assert begun[-1] == "narrow.source"
    assert [r.model.label for r in outcome.sheet.variants("one")] == ["bfloat16", label]


def test_what_measures_the_machine_is_alone_on_it(models, tmp_path, monkeypatch):
    class Recording(Here):
        running: ClassVar[set[str]] = set()

        def submit(self, name, command, log, needs):
            self.running.add(name)
            together.append(set(self.running))
            self.ended.append((name, 0))

        def finished(self):
            name, code = super().finished()
            self.running.discard(name)
            return name, code

    for probes, most in ((("size", "perplexity"), 3), (("size", "speed"), 1)):
        together = []
        recipe = recipe_of(models, ["rtn:4", "rtn:8"], tmp_path / probes[1])
        recipe = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"probes": probes})})
        monkeypatch.setattr(sweeps, "_sheet", lambda *_: None)
        sweeps.run(recipe, Recording(slots=3))
        judging = [names for names in together if any(not name.endswith("convert") for name in names)]
        assert max(map(len, judging)) == most


def test_this_machine_tells_how_processes_ended(tmp_path):
    executor = Local(2)
    for name, code in (("well", "print('said')"), ("badly", "raise SystemExit(3)")):
        executor.submit(name, [sys.executable, "-c", code], tmp_path / name, Needs())
    assert sorted(executor.finished() for _ in range(2)) == [("badly", 3), ("well", 0)]
    assert (tmp_path / "well").read_text() == "said\n"
    dying = f"import os; os.kill(os.getpid(), {signal.SIGKILL})"
    executor.submit("killed", [sys.executable, "-c", dying], tmp_path / "killed", Needs())
    assert executor.finished() == ("killed", -signal.SIGKILL)
    executor.submit("long", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "long", Needs())
    [process] = executor._running.values()
    executor.close()
    assert process.poll() == -signal.SIGTERM


def test_a_task_whose_process_is_gone_is_told(done, tmp_path):
    state = place_of(done, "one.rtn-4").state()
    assert (state.state, state.reason) == ("done", None)
    assert state.seconds > 0
    assert state.peak_bytes > 10_000_000
    place = place_of(tmp_path, "one.rtn-4")
    place.folder.mkdir(parents=True)
    shutil.copy(place_of(done, "one.rtn-4").folder / "task.json", place.folder)
    assert lines_of(tmp_path) == ["one.rtn-4: waiting"]
    running = state.model_copy(update={"state": "running", "pid": os.getpid()})
    place.tell(running)
    with place.living():
        assert "running for" in lines_of(tmp_path)[0]
        place.tell(running.model_copy(update={"pid": 1 << 22}))
        assert "ended without a word" in lines_of(tmp_path)[0]
        place.tell(running.model_copy(update={"began": 1.0}))  # this process is a later one with the same number
        assert "ended without a word" in lines_of(tmp_path)[0]
        # One of another host runs as long as it gives signs of life.
        place.tell(running.model_copy(update={"host": "elsewhere", "pid": 1 << 22}))
        assert "running for" in lines_of(tmp_path)[0]
        os.utime(place.alive, (0, 0))
        assert re.search(r"unknown: no sign of life for \d{9,} s \(process", lines_of(tmp_path)[0])
