import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from edits import edit_json, put
from tiny_models import CALIBRATION, EVALUATION, save_tiny

from quantkit.comparison import sweep as sweeps
from quantkit.comparison.compare import compare
from quantkit.comparison.executors import LOST, Local
from quantkit.comparison.tasks import Task, read_task, read_tasks, run_task
from quantkit.errors import QuantkitError
from quantkit.records.recipe import SweepRecipe, parse
from quantkit.records.report import Hardware
from quantkit.report.page import find_artifacts
from quantkit.report.table import read_places
from quantkit.system.progress import Progress

SETTINGS = {"calibration": CALIBRATION, "evaluation": {**EVALUATION, "probes": ("size", "perplexity")}}


@dataclass
class Here(Local):
    """An executor that does a task in this process as soon as it is handed over."""

    begun: list[str] = field(default_factory=list)
    ended: list[tuple[str, int]] = field(default_factory=list)
    memory: dict[str, int | None] = field(default_factory=dict)

    def has_room(self, task):
        return not self.ended

    def submit(self, task, command):
        self.memory[task.name] = task.memory
        assert command[1:] == ["-m", "quantkit", "sweep-task", str(task.folder)]
        self.begun.append(task.name)
        self.ended.append((task.name, self.code_of(task)))

    def code_of(self, task):
        try:
            run_task(task.folder, Progress())
        except (QuantkitError, OSError) as error:
            task.log.write_text(str(error), encoding="utf-8")
            return 1
        return 0

    def finished(self):
        return self.ended.pop(0)

    def close(self):
        assert not self.ended


def recipe_of(models, variants, out):
    values = {"models": [str(model) for model in models], "variants": variants, "out": str(out), **SETTINGS}
    return parse(SweepRecipe, values, "a recipe")


def swept(models, variants, out, **named):
    executor = Here()
    outcome = sweeps.run_sweep(recipe_of(models, variants, out), executor, **named)
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
        assert sweeps.run_sweep(parse(SweepRecipe, values, "a recipe"), executor).failed == {}
        assert executor.begun == want


def test_figures_of_quality_are_used_again_on_another_machine_and_speeds_are_not(models, tmp_path, monkeypatch):
    fast = {**EVALUATION, "limit": 1, "probes": ("speed",), "new_tokens": 2, "repeats": 1}
    quality, speed = (recipe_of(models[:1], ["rtn:4"], tmp_path / name) for name in ("quality", "speed"))
    speed = parse(SweepRecipe, speed.model_dump() | {"evaluation": fast}, "a recipe")
    first = Here()
    for given in (quality, speed):
        assert sweeps.run_sweep(given, first).failed == {}
    assert all(1e8 < (memory or 0) < 5e9 for memory in first.memory.values()), first.memory  # as is forecast
    hardware = Hardware(cpu="Other CPU", cores=64, memory_bytes=1 << 40)
    monkeypatch.setattr("quantkit.evaluation.evaluate.this_machine", lambda: hardware)
    again = Here()
    sweeps.run_sweep(quality, again)
    assert again.begun == []
    sweeps.run_sweep(speed, again)
    assert again.begun == ["one.source", "one.rtn-4"]


def test_what_fails_is_told_and_stops_nothing_else(models, tmp_path):
    out = tmp_path / "out"
    blocked = out / "models" / "one" / "reports" / "rtn-4.json"
    blocked.mkdir(parents=True)  # where the report is to lie: found out by the task
    outcome, begun = swept(models[:1], ["rtn:4", "rtn:8"], out)
    assert list(outcome.failed) == ["one.rtn-4"]
    assert begun[-3:] == ["one.rtn-4", "one.rtn-8.convert", "one.rtn-8"]
    assert f"log: {out / 'tasks' / 'one.rtn-4' / 'log'}" in outcome.sheet.notes()[0]
    assert outcome.sheet.notes()[0].startswith("Not measured: one.rtn-4: ")
    assert [r.model.label for r in outcome.sheet.variants("one")] == ["bfloat16", "rtn-8"]
    assert any(task.status().startswith("one.rtn-4: failed: ") for task in read_tasks(out))
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
    class Recording(Local):
        def submit(self, task, command):
            self._running[task.name] = task, None
            together.append(set(self._running))

        def finished(self):
            return self._running.popitem()[0], 0

    for probes, most in ((("size", "perplexity"), 3), (("size", "speed"), 1)):
        together = []
        recipe = recipe_of(models, ["rtn:4", "rtn:8"], tmp_path / probes[1])
        recipe = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"probes": probes})})
        monkeypatch.setattr(sweeps, "_sheet", lambda *_: None)
        sweeps.run_sweep(recipe, Recording(slots=3))
        judging = [names for names in together if any(not name.endswith("convert") for name in names)]
        assert max(map(len, judging)) == most


def task_in(out, name, **values):
    """A task of a folder that nothing has been done of."""
    task = Task(out=str(out), name=name, kind="convert", model="m", recipe={"model": "m", "variants": ()}, **values)
    task.update()
    return task


def test_this_machine_tells_how_processes_ended(tmp_path):
    executor = Local(2)
    for name, code in (("well", "print('said')"), ("badly", "raise SystemExit(3)")):
        executor.submit(task_in(tmp_path, name), [sys.executable, "-c", code])
    assert sorted(executor.finished() for _ in range(2)) == [("badly", 3), ("well", 0)]
    assert (tmp_path / "tasks" / "well" / "log").read_text() == "said\n"
    dying = f"import os; os.kill(os.getpid(), {signal.SIGKILL})"
    executor.submit(task_in(tmp_path, "killed"), [sys.executable, "-c", dying])
    assert executor.finished() == ("killed", -signal.SIGKILL)
    executor.submit(task_in(tmp_path, "long"), [sys.executable, "-c", "import time; time.sleep(600)"])
    [(_, process)] = executor._running.values()
    executor.close()
    assert process.poll() == -signal.SIGTERM


def test_a_task_whose_process_is_gone_is_told(done, tmp_path):
    task = read_task(done / "tasks" / "one.rtn-4")
    assert (task.state, task.reason) == ("done", "")
    assert task.seconds > 0
    assert task.peak_bytes > 10_000_000
    task.out = str(tmp_path)

    def status(**values):
        task.update(**values)
        return read_task(task.folder).status()

    assert status(state="waiting") == "one.rtn-4: waiting"
    assert "running for" in status(state="running", pid=os.getpid())
    assert "ended without a result" in status(pid=1 << 22)
    assert "ended without a result" in status(pid=os.getpid(), began=1.0)  # a later process with the same number
    # One of another host runs as long as it gives signs of life.
    assert "running for" in status(host="elsewhere", pid=1 << 22)
    os.utime(task.folder / "task.json", (0, 0))
    assert re.search(r"unknown: no sign of life for \d{9,} s \(process", read_task(task.folder).status())


def test_paths_of_a_recipe_hold_in_the_folder_of_the_command(models, tmp_path, monkeypatch):
    """Also where a task runs in another folder, as on the nodes of Ray."""

    class Elsewhere(Here):
        def code_of(self, task):
            with monkeypatch.context() as patch:
                patch.chdir("/")
                return super().code_of(task)

    monkeypatch.chdir(tmp_path)
    Path("here").symlink_to(models[0])
    shutil.copy(SETTINGS["evaluation"]["text"], "text.txt")
    recipe = recipe_of(["here"], ["rtn:4"], "out")
    text = {"text": "text.txt"}
    values = {key: recipe.model_dump()[key] | text for key in ("calibration", "evaluation")}
    outcome = sweeps.run_sweep(parse(SweepRecipe, recipe.model_dump() | values, "a recipe"), Elsewhere())
    assert outcome.failed == {}
    assert outcome.sheet.columns == ["bfloat16", "rtn-4"]
    assert Path("out/models/here/reports/rtn-4.json").is_file()


def test_why_a_process_ended_before_it_began_its_task_is_told(models, tmp_path):
    class Broken(Here):
        def code_of(self, task):
            task.log.write_text("nothing to say\nerror: RecipeError: it does not exist\n\n", encoding="utf-8")
            return 1

    outcome = sweeps.run_sweep(recipe_of(models[:1], ["rtn:4"], tmp_path), Broken())
    why = "its process ended with exit code 1: RecipeError: it does not exist (log: "
    assert outcome.failed["one.source"].startswith(why)
    assert outcome.failed["one.rtn-4"] == "not tried: one.source failed"
    lines = [task.status() for task in read_tasks(tmp_path)]
    assert lines[0] == "one.rtn-4: failed: not tried: one.source failed"
    assert lines[-1].startswith(f"one.source: failed: {why}")


def test_a_task_whose_machine_is_lost_is_started_again_once(models, tmp_path):
    class Losing(Here):
        def code_of(self, task):
            task.update(host="node-7")
            return LOST if self.begun.count(task.name) <= times else super().code_of(task)

    for times, code in ((1, 0), (2, LOST)):
        said, executor = [], Losing()
        recipe = recipe_of(models[:1], (), tmp_path / str(times))
        outcome = sweeps.run_sweep(recipe, executor, Progress(speaker=said.append))
        assert executor.begun == ["one.source"] * 2
        assert said[1] == "one.source: lost on node-7; restarting it"
        assert said[-1] == ("one.source: failed: lost on node-7" if code else "one.source: done")
        assert list(outcome.failed) == (["one.source"] if code else [])
