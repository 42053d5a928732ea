"""Sweeps on a Ray cluster of two nodes: the same figures, also after nodes, the driver or all was killed. Long."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_executors import command, ended, figures, said, until
from test_sweep import Here
from tiny_models import CALIBRATION, EVALUATION, save_tiny

from quantkit.recipe import SweepRecipe, load_recipe, parse
from quantkit.sweep.executor import Needs
from quantkit.sweep.run import run
from quantkit.sweep.state import place_of
from quantkit.sweep.tasks import lines_of, read

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quantkit[ray]'")
pytestmark = pytest.mark.slow
ROOM: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
GB = 10**9


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps")
    save_tiny(folder / "one")
    values = {
        "models": [str(folder / "one")],
        "variants": [{"method": "rtn", "bits": "4"}, {"method": "gguf", "bits": "Q8_0"}],
        "calibration": CALIBRATION,
        "evaluation": {**EVALUATION, "probes": ["size", "perplexity"]},
    }
    path = folder / "sweep.yaml"
    path.write_text(json.dumps(values))
    return path


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What this process gives."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert run(load_recipe(recipe).model_copy(update={"out": str(out)}), Here()).failed == {}
    return figures(out)


@contextmanager
def cluster_of(*nodes: dict[str, Any]) -> Iterator[Any]:
    """A cluster of such nodes on this machine; `nodes` of it are those after the first."""
    from ray.cluster_utils import Cluster

    first, *others = nodes
    cluster = Cluster(initialize_head=True, head_node_args={**ROOM, **first})
    try:
        yield cluster, [cluster.add_node(**{**ROOM, **node}) for node in others]
    finally:
        cluster.shutdown()


def test_two_nodes_of_ray_give_the_same_also_when_one_is_lost(
    recipe: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    from quantkit.sweep.ray import OnRay

    class Losing(OnRay):
        """Kills the second node when the first task has ended."""

        def finished(self) -> tuple[str, int]:
            answer = super().finished()
            if nodes:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            return answer

    with cluster_of({}, {}) as (cluster, nodes):
        for name, executor in (("kept", OnRay), ("lost", Losing)):
            out = tmp_path / name
            given = load_recipe(recipe).model_copy(update={"out": str(out)})
            outcome = run(given, executor(cluster.address, 1))
            if outcome.failed:  # what was on the lost node twice
                outcome = run(given, OnRay(cluster.address, 1))
            assert outcome.failed == {}
            assert figures(out) == whole


@pytest.mark.parametrize("lost", ["the driver", "the cluster"])
def test_after_the_driver_or_the_cluster_was_killed_the_same_command_goes_on(
    lost: str, recipe: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with cluster_of({}, {}) as (cluster, _):
        first = command(recipe, out, "--executor", "ray", "--address", cluster.address)
        until(lambda: ended(out, "one.source"))
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
        if lost == "the driver":
            finish(recipe, out, cluster.address)
        else:
            for node in cluster.list_all_nodes():
                node.kill_all_processes(check_alive=False, allow_graceful=False)
    if lost == "the cluster":
        with cluster_of({}, {}) as (cluster, _):
            finish(recipe, out, cluster.address)
    assert figures(out) == whole


def finish(recipe: Path, out: Path, address: str) -> None:
    """Give the same command once more: what is done is not begun again, and the log of none is longer."""
    finished = {task.name: place_of(out, task.name) for task in read(out) if ended(out, task.name)}
    before = {name: (place.state(), place.log.read_bytes()) for name, place in finished.items()}
    assert before
    words = said(command(recipe, out, "--executor", "ray", "--address", address))
    for name, place in finished.items():
        assert f"{name}: begun" not in words
        assert (place.state(), place.log.read_bytes()) == before[name]


def test_what_no_node_has_memory_for_is_told_and_not_waited_for(recipe: Path, tmp_path: Path) -> None:
    from quantkit.sweep.ray import OnRay

    given = load_recipe(recipe).model_copy(update={"out": str(tmp_path / "out"), "variants": ()})
    with cluster_of({"memory": 200 << 20}, {"memory": 4 * GB}) as (cluster, nodes):
        executor = OnRay(cluster.address, 1)
        assert executor.most_memory == 4 * GB
        assert executor.refuse(Needs(memory=4 * GB)) is None
        assert "the largest node gives tasks 4.00 GB" in str(executor.refuse(Needs(memory=4 * GB + 10**7)))
        assert executor.refuse(Needs(machine="laptop")) == "no node has the resource 'laptop'"
        log = tmp_path / "log"
        executor.submit("first", ["python", "-c", "pass"], log, Needs(memory=3 * GB))
        assert executor.finished() == ("first", 0)
        # Both want more than half of the only node that is large enough; that node is lost while the second waits.
        executor.submit("long", ["python", "-c", "import time; time.sleep(600)"], log, Needs(memory=3 * GB))
        executor.submit("waiting", ["python", "-c", "pass"], log, Needs(memory=3 * GB))
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        assert sorted(executor.finished()[0] for _ in range(2)) == ["long", "waiting"]
        executor.close()
        outcome = run(given, OnRay(cluster.address, 1))
    assert set(outcome.failed) == {"one.source"}
    assert all("would need" in reason and "0.21 GB" in reason for reason in outcome.failed.values()), outcome.failed


def test_a_node_s_resource_is_the_label_of_a_machine(tmp_path: Path) -> None:
    from quantkit.sweep.ray import OnRay

    values = {
        "models": [str(save_tiny(tmp_path / "one"))],
        "variants": [],
        "machines": ["laptop", "absent"],
        "evaluation": {**EVALUATION, "probes": ["size", "speed"], "new_tokens": 2, "repeats": 1},
        "out": str(tmp_path / "out"),
    }
    with cluster_of({}, {"resources": {"laptop": 1}}) as (cluster, _):
        outcome = run(parse(SweepRecipe, values, "a recipe"), OnRay(cluster.address, 1))
    assert outcome.failed == {}
    assert outcome.waiting == {"absent": ("one.source@absent",)}
    assert "one.source@absent: waiting (for the machine absent)" in lines_of(tmp_path / "out")
    assert outcome.sheet is not None
    assert [row.title for row in outcome.sheet.rows("one")] == [
        *("file size", "bits per weight"),
        *("ms/token @ 1 thread, laptop", "ms to first token @ 1 thread, laptop"),
    ]
