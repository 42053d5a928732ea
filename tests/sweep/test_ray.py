"""Sweeps on a Ray cluster of two nodes: the same figures, also after a node was lost."""

from contextlib import contextmanager

import pytest
from test_executors import figures, recipe, whole

from quantkit.recipe import load_recipe
from quantkit.sweep.executor import Needs
from quantkit.sweep.run import run

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quantkit[ray]'")
pytestmark = pytest.mark.slow
__all__ = ["recipe", "whole"]
ROOM = {"num_cpus": 1, "object_store_memory": 100 << 20}
GB = 10**9


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


def test_two_nodes_of_ray_give_the_same_also_when_one_is_lost(recipe, whole, tmp_path):
    from quantkit.sweep.ray import OnRay

    class Losing(OnRay):
        """Kills the second node when the first task has ended."""

        def finished(self):
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


def test_what_no_node_has_memory_for_is_told_and_not_waited_for(recipe, tmp_path):
    from quantkit.sweep.ray import OnRay

    given = load_recipe(recipe).model_copy(update={"out": str(tmp_path / "out"), "variants": ()})
    with cluster_of({"memory": 200 << 20}, {"memory": 4 * GB}) as (cluster, nodes):
        executor = OnRay(cluster.address, 1)
        assert executor.most_memory == 4 * GB
        assert executor.refuse(Needs(memory=4 * GB)) is None
        assert "the largest node gives tasks 4.00 GB" in str(executor.refuse(Needs(memory=4 * GB + 10**7)))
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
    assert set(outcome.failed) == {"one.source", "two.source"}
    assert all("would need" in reason and "0.21 GB" in reason for reason in outcome.failed.values()), outcome.failed
