"""Executors: the same figures wherever tasks run, and the same table after anything was killed. Long."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec

import psutil
import pytest
from killed import until
from test_sweep import figures as figures_of
from test_sweep import task_in
from tiny_models import CALIBRATION, EVALUATION, save_tiny

from quantkit.comparison.executors import OnRay
from quantkit.comparison.sweep import run_sweep
from quantkit.comparison.tasks import read_task, read_tasks
from quantkit.records.recipe import ModelRef, load_recipe
from quantkit.report.table import read_places
from quantkit.system.progress import Progress

pytestmark = pytest.mark.slow
VARIANTS = [{"method": "rtn", "bits": "4"}, {"method": "gptq", "bits": "4"}]
NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'quantkit-lm[ray]'")
ROOM = {"num_cpus": 1, "object_store_memory": 100 << 20}
GB = 10**9


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps")
    save_tiny(folder / "one", num_hidden_layers=1)
    save_tiny(folder / "two", num_hidden_layers=1)
    path = folder / "sweep.yaml"
    values = {"models": [str(folder / "one"), str(folder / "two")], "variants": VARIANTS, "calibration": CALIBRATION}
    values["evaluation"] = {**EVALUATION, "probes": ["size", "perplexity"]}
    path.write_text(json.dumps(values))
    return path


def figures(out):
    return {table.models[0]: figures_of(table) for _, table in read_places([str(out)])}


def command(recipe, out, *words):
    given = [sys.executable, "-m", "quantkit", "run", str(recipe), "--out", str(out), *words]
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(given, stderr=subprocess.PIPE, stdout=nowhere, start_new_session=True, text=True)


def said(process):
    _, words = process.communicate()
    assert process.returncode == 0, words
    return words


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    said(command(recipe, out))
    return figures(out)


def ended(out, name):
    folder = out / "tasks" / name
    return folder.is_dir() and read_task(folder).state == "done"


def test_a_killed_sweep_goes_on_to_the_same_table(recipe, whole, tmp_path):
    out = tmp_path / "out"
    first = command(recipe, out)
    until(lambda: ended(out, "one.rtn-4"))
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    for task in [task for task in read_tasks(out) if task.state == "running"]:
        until(lambda pid=task.pid: not psutil.pid_exists(pid))  # it ends by itself
    before = read_task(out / "tasks" / "one.rtn-4")
    words = said(command(recipe, out))
    assert read_task(out / "tasks" / "one.rtn-4") == before
    assert "one.rtn-4: begun" not in words
    assert "two.gptq-4: begun" in words
    assert figures(out) == whole


def test_several_processes_give_the_same(recipe, whole, tmp_path):
    said(command(recipe, tmp_path / "several", "--processes", "2"))
    assert figures(tmp_path / "several") == whole


@contextmanager
def cluster_of(*nodes):
    """A cluster of such nodes on this machine; `nodes` of it are those after the first."""
    from ray.cluster_utils import Cluster

    first, *others = nodes
    cluster = Cluster(initialize_head=True, head_node_args={**ROOM, **first})
    try:
        yield cluster, [cluster.add_node(**{**ROOM, **node}) for node in others]
    finally:
        cluster.shutdown()


@NEEDS_RAY
def test_two_nodes_of_ray_give_the_same_also_when_one_is_lost(recipe, whole, tmp_path, monkeypatch, capsys):
    """Also where the cluster was started in another folder than the one that the recipe's paths hold in."""

    class Losing(OnRay):
        def finished(self):
            answer = super().finished()
            if nodes:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            return answer

    with cluster_of({}, {}) as (cluster, nodes):
        monkeypatch.chdir(tmp_path)
        for name in ("one", "two"):
            (tmp_path / name).symlink_to(recipe.parent / name)
        for out, executor in (("kept", OnRay), ("lost", Losing)):
            words = []
            models = [ModelRef(model="one"), ModelRef(model="two")]
            given = load_recipe(recipe).model_copy(update={"models": tuple(models), "out": out})
            outcome = run_sweep(given, executor(cluster.address, 1), Progress(speaker=words.append))
            if outcome.failed:  # what was on the lost node twice
                outcome = run_sweep(given, OnRay(cluster.address, 1))
            assert outcome.failed == {}
            assert figures(tmp_path / out) == whole
        assert any(": lost" in line and "restarting it" in line for line in words), words
        assert "(raylet)" not in capsys.readouterr().out


@NEEDS_RAY
def test_what_no_node_has_memory_for_is_told_and_not_waited_for(recipe, tmp_path):
    given = load_recipe(recipe).model_copy(update={"out": str(tmp_path / "out"), "variants": ()})
    with cluster_of({"memory": 200 << 20}, {"memory": 4 * GB}) as (cluster, nodes):
        executor = OnRay(cluster.address, 1)
        assert executor.most_memory == 4 * GB
        assert executor.refuse(task_in(tmp_path, "fits", memory=4 * GB)) is None
        large = task_in(tmp_path, "large", memory=4 * GB + 10**7)
        assert "the largest node has 4.00 GB" in str(executor.refuse(large))
        executor.submit(task_in(tmp_path, "first", memory=3 * GB), ["python", "-c", "pass"])
        assert executor.finished() == ("first", 0)
        # Both want more than half of the only node that is large enough; that node is lost while the second waits.
        sleeps = ["python", "-c", "import time; time.sleep(600)"]
        executor.submit(task_in(tmp_path, "long", memory=3 * GB), sleeps)
        executor.submit(task_in(tmp_path, "waiting", memory=3 * GB), ["python", "-c", "pass"])
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        assert sorted(executor.finished()[0] for _ in range(2)) == ["long", "waiting"]
        executor.close()
        outcome = run_sweep(given, OnRay(cluster.address, 1))
    assert set(outcome.failed) == {"one.source", "two.source"}
    assert all("would need" in reason and "0.21 GB" in reason for reason in outcome.failed.values()), outcome.failed
