"""How long a run still takes: by hand, and on the recorded steps of `make demo`."""

import json
from pathlib import Path

from quantkit.cli.progress import OpenSteps
from quantkit.progress import Step, Timed

WORK = ("calibrating blocks", "quantizing layers", "packing tensors", "converting with CTranslate2")
RECORDED = Path(__file__).parent / "demo_run.jsonl"  # python -m bench.record_demo


def test_pieces_of_known_cost_take_as_long_as_those_that_are_done():
    step = Step("all", total=10, piece=2)
    timed = Timed(step, began=0, piece_began=0)
    assert timed.left(5) is None
    quarter = Step("evaluating", total=4, done=1)
    assert timed.left(5, quarter) == 20 - 5 + 10 * 8  # 20 s for 2 units
    step.done, step.piece = 2, 4
    timed.update(20)
    assert timed.left(30) == 40 - 10 + 10 * 4
    assert timed.left(100) == 4 + 10 * 4  # the piece takes longer than its cost says
    assert timed.left(60, Step("blocks", total=4, done=1, work=True)) == 120 + 10 * 4


def test_the_recorded_demo_never_seemed_to_take_more_than_twice_as_long_as_it_did():
    changes = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    end = changes[-1][0]
    now = [0.0]
    steps = OpenSteps(lambda: now[0])
    known = {}
    estimates = 0
    for (at, number, title, total, done, piece, ended), following in zip(changes, [*changes[1:], [end]], strict=True):
        step = known.setdefault(number, Step(title, total, work=title.endswith(WORK)))
        step.done, step.piece, step.ended = done, piece, ended
        now[0] = at
        steps.take(step)
        for now[0] in (at, following[0]):  # just after a change, and just before the next
            outer = next((timed for timed in steps.all if timed.step.piece), None)
            if outer is None or now[0] < 60 or end - now[0] < 5:
                continue
            left = outer.left(now[0], steps.all[-1].step)
            assert left is not None
            assert left <= 2 * (end - now[0]), (now[0], title, left, end - now[0])
            estimates += 1
    assert estimates > 100
