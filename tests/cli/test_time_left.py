"""How long a run still takes: by hand, and on recorded runs of `make demo`."""

from itertools import accumulate

import pytest

from quantkit.cli.progress import Lines
from quantkit.progress import Pieces, Progress, Step, Timed
from quantkit.sweep.compare import CALIBRATION_COST, CONVERSION_COST, SOURCE_COST

# Seconds of the source, and of the conversion and the evaluation of each variant: sums of logged steps and 2 s for each
RECORDED = {
    "AVX-512": [18, 51, 8, 36, 8, 5, 10, 5, 8, 6, 12, 2, 7, 2, 7, 3, 9, 2, 11, 3, 9],
    "AVX2": [22, 183, 15, 62, 10, 5, 9, 5, 10, 6, 12, 2, 9, 3, 9, 3, 10, 3, 13, 3, 10],
}


def test_a_piece_takes_as_long_as_others_of_its_kind():
    now = [0.0]
    pieces = Pieces([("source", 2), ("slow", 3), ("evaluation", 1), ("slow", 1), ("evaluation", 1)], lambda: now[0])
    assert pieces.next() == (None, None)
    now[0] = 20
    assert pieces.next() == (30, 10 + 10 + 10)
    now[0] = 110  # 30 s for a unit of the slow one, 22 for one of all
    assert pieces.next() == (22, 30 + 22)
    now[0] = 115
    assert pieces.next() == (30, 5)


def test_within_a_piece_the_work_itself_is_believed():
    step = Step("all", total=10)
    timed = Timed(step, began=0, piece_began=0)
    assert timed.left(5) is None
    step.done, step.expected, step.after = 2, 20, 40
    timed.update(20)
    assert timed.left(25) == 15 + 40
    assert timed.left(100) == 2 + 40  # the piece takes longer than expected
    assert timed.left(30, Step("evaluating", total=4, done=1)) == 10 + 40
    assert timed.left(60, Step("blocks", total=4, done=1, work=True)) == 120 + 40
    assert Timed(Step("blocks", total=4, done=1), 0, 0).left(10) == 30


def test_a_log_tells_what_is_left_of_the_whole():
    now, said = [0.0], []
    lines = Lines(said.append, lambda: now[0])
    pieces = Pieces([("source", 2), ("slow", 2), ("evaluation", 2)], lambda: now[0])
    with Progress(lines.draw).step("all variants", 10) as advance:
        advance(0, pieces=pieces)
        now[0] = 20
        advance(2)
        advance(0, pieces=pieces)
        with Progress(lines.draw).within("gptq-4").step("blocks", 4, work=True) as inner:
            now[0] = 40
            inner(2)
            lines.tick()
    assert said[0] == "gptq-4: blocks: 50% after 20 s, about 20 s left; all variants: about 40 s left"


@pytest.mark.parametrize("seconds", RECORDED.values(), ids=RECORDED.keys())
def test_the_demo_never_seems_to_take_more_than_twice_as_long_as_it_does(seconds):
    calibration = ("calibration", CONVERSION_COST + CALIBRATION_COST * 16 / 4)
    kinds = [("evaluation", SOURCE_COST)]
    for number in range(10):
        kinds += [calibration if number < 2 else ("conversion", CONVERSION_COST), ("evaluation", 1.0)]
    now = [0.0]
    pieces, step = Pieces(kinds, lambda: now[0]), Step("all", total=100)
    timed = Timed(step, 0, 0)
    ends = list(accumulate(seconds))
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        now[0] = begin
        step.expected, step.after = pieces.next()
        step.done = number
        timed.update(begin)
        for moment in (begin, end - 1):
            work = Step("blocks", total=seconds[number], done=moment - begin, work=kinds[number][0] == "calibration")
            if number and 60 <= moment < ends[-1] - 5:
                left = timed.left(moment, work)
                assert (ends[-1] - moment) / 2 <= left <= 2 * (ends[-1] - moment), (kinds[number], moment, left)
