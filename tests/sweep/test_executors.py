"""Executors: the same figures wherever tasks run, and the same table after anything was killed. Long."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from killed import until
from test_sweep import figures as figures_of
from tiny_models import CALIBRATION, EVALUATION, save_tiny

from quantkit.report.sheet import read_places
from quantkit.sweep.state import place_of
from quantkit.sweep.tasks import read

pytestmark = pytest.mark.slow
VARIANTS = [{"method": "rtn", "bits": "4"}, {"method": "gptq", "bits": "4"}]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps")
    save_tiny(folder / "one", num_hidden_layers=1)
    save_tiny(folder / "two", num_hidden_layers=1)
    path = folder / "sweep.yaml"
    values = {
        "models": [str(folder / "one"), str(folder / "two")],
        "variants": VARIANTS,
        "calibration": CALIBRATION,
        "evaluation": {**EVALUATION, "probes": ["size", "perplexity"]},
    }
    path.write_text(json.dumps(values))
    return path


def figures(out):
    return {table.model: figures_of(table) for _, table in read_places([str(out)])}


def command(recipe, out, *words):
    given = [sys.executable, "-m", "quantkit.cli", "run", str(recipe), "--out", str(out), *words]
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(given, stderr=subprocess.PIPE, stdout=nowhere, start_new_session=True, text=True)


def said(process):
    """What a command that ends well has said."""
    _, words = process.communicate()
    assert process.returncode == 0, words
    return words


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """What one process after the other gives."""
    out = tmp_path_factory.mktemp("whole") / "out"
    said(command(recipe, out))
    return figures(out)


def ended(out, name):
    state = place_of(out, name).state()
    return state is not None and state.state == "done"


def test_a_killed_sweep_goes_on_to_the_same_table(recipe, whole, tmp_path):
    out = tmp_path / "out"
    first = command(recipe, out)
    until(lambda: ended(out, "one.rtn-4"))
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    told = (place_of(out, task.name).state() for task in read(out))
    for state in [state for state in told if state is not None and state.state == "running"]:
        until(lambda pid=state.pid: not psutil.pid_exists(pid))  # it ends by itself
    began = place_of(out, "one.rtn-4").state()
    words = said(command(recipe, out))
    assert place_of(out, "one.rtn-4").state() == began
    assert "one.rtn-4: begun" not in words
    assert "two.gptq-4: begun" in words
    assert figures(out) == whole


def test_several_processes_give_the_same(recipe, whole, tmp_path):
    said(command(recipe, tmp_path / "several", "--processes", "2"))
    assert figures(tmp_path / "several") == whole
