import os
import re
import warnings
from contextlib import suppress
from importlib.metadata import version
from itertools import accumulate

import pytest
import tiny_models
from killed import started
from tiny_models import EVALUATION_FLAGS, quantkit

from quantkit.cli import progress as module
from quantkit.cli.progress import Lines, configure_verbosity, progress_bars
from quantkit.comparison.compare import CALIBRATION_COST, CONVERSION_COST, SOURCE_COST
from quantkit.errors import DISTRIBUTION
from quantkit.system.progress import Pieces, Progress, Step, Timed

LINE = re.compile(r"[^\r\x1b]+: (done, \d+ s|done, \d+:\d\d min|\d+% after \d.*)")
# Seconds of the source, and of the conversion and the evaluation of each variant: sums of logged steps and 2 s for each
RECORDED = {
    "AVX-512": [18, 51, 8, 36, 8, 5, 10, 5, 8, 6, 12, 2, 7, 2, 7, 3, 9, 2, 11, 3, 9],
    "AVX2": [22, 183, 15, 62, 10, 5, 9, 5, 10, 6, 12, 2, 9, 3, 9, 3, 10, 3, 13, 3, 10],
}


def test_lines_of_a_log():
    now, told = [0.0], list[str]()
    lines = Lines(told.append, lambda: now[0])
    progress = Progress(lines.draw).within("gptq-4")
    lines.tick()
    with progress.step("calibrating", 40) as advance:
        now[0] = 30
        lines.tick()
        advance(10)
        now[0] = 60
        lines.tick()
        with progress.step("reading", 2) as inner:
            inner(1)
            now[0] = 61
            lines.tick()
            inner(1)
            now[0] = 74
            lines.tick()
            now[0] = 75.4
        now[0] = 200
        advance(30)
    lines.tick()
    with suppress(KeyError), Progress(lines.draw).step("writing", 8) as advance:
        advance(2)
        now[0] = 4000
        raise KeyError
    with Progress(lines.draw).step("nothing", 0):
        pass
    assert told == [
        "gptq-4: calibrating: 0% after 30 s, just begun",
        "gptq-4: calibrating: 25% after 1:00 min, about 3:00 min left",
        "gptq-4: calibrating: 25% after 1:01 min, about 3:03 min left",  # the inner step has just begun
        "gptq-4: reading: 100% after 14 s, about 0 s left",
        "gptq-4: reading: done, 15 s",
        "gptq-4: calibrating: done, 3:20 min",
        "writing: ended at 25%, 1:03 h",
        "nothing: done, 0 s",
    ]


@pytest.mark.parametrize("terminal", ["dumb", "xterm-256color", None])
def test_a_log_has_lines_whatever_terminal_the_environment_names(terminal, monkeypatch, capsys):
    monkeypatch.setattr(module, "is_quiet", False)
    monkeypatch.delenv("TERM", raising=False)
    if terminal is not None:
        monkeypatch.setenv("TERM", terminal)
    long = "x" * 200  # no line is wrapped
    with progress_bars() as progress:
        progress.say(f"[bold]{long}")
        with progress.step(f"reading {long}", 2) as advance:
            advance(2)
    assert capsys.readouterr().err == f"[bold]{long}\nreading {long}: done, 0 s\n"


def spoken(monkeypatch, *arguments):
    """Run the command line in this process; progress is kept in what it told."""
    monkeypatch.setattr(module, "is_quiet", False)
    monkeypatch.setattr(tiny_models, "without_progress", lambda text: text)
    return quantkit(*arguments)


def test_a_conversion_into_a_log_is_one_line_a_step_and_libraries_add_nothing(tiny, tmp_path):
    started(["convert", str(tiny), "--method", "nf4", "--out", str(tmp_path / "out")], tmp_path / "log").wait(0)
    log = (tmp_path / "log").read_text()
    assert all(LINE.fullmatch(line) for line in log.splitlines()), log
    assert "reading the artifact back: done, " in log


def test_a_comparison_tells_whose_steps_they_are(one_block, tmp_path, monkeypatch):
    words = ("--methods", "rtn:4", *EVALUATION_FLAGS, "--threads", "1", "--out", tmp_path / "out")
    done = spoken(monkeypatch, "compare", one_block, *words)
    assert done.code == 0, done.err
    rows = [line for line in done.err.splitlines() if ": perplexity " in line and " ms/token @ 1 thread" in line]
    assert [row.split(":")[0] for row in rows] == ["bfloat16", "rtn-4"]
    device, first, *others = done.err.splitlines()
    assert device.startswith("device: "), done.err
    assert first.startswith("evaluated whole: "), done.err
    assert all(LINE.fullmatch(line) for line in others if line not in rows), done.err
    for part in ("rtn-4: rtn: rounding layers: ", "rtn-4: perplexity (llama.cpp): ", "bfloat16: speed at 1 thread: "):
        assert part in done.err, done.err


def test_quiet_is_the_result_alone(tiny, tmp_path, monkeypatch):
    done = spoken(monkeypatch, "convert", tiny, "--method", "rtn", "--out", tmp_path / "out", "--quiet")
    assert (done.code, done.err) == (0, "")
    assert str(tmp_path / "out") in done.out
    # Both at once are refused.
    done = spoken(monkeypatch, "convert", tiny, "--method", "rtn", "--quiet", "--verbose")
    assert done.code == 2
    assert "exclude each other" in done.err


def test_libraries_are_silent_unless_verbose_is_given(monkeypatch):
    monkeypatch.setattr(module, "is_quiet", False)
    names = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_VERBOSITY")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        configure_verbosity(False, True)
        warnings.warn("a word", stacklevel=1)
        assert not set(names) & os.environ.keys()
        configure_verbosity(False, False)
        warnings.warn("another", stacklevel=1)
        assert [os.environ[name] for name in names] == ["1", "1", "error"]
    assert [str(one.message) for one in heard] == ["a word"]


def test_without_a_command_it_says_how_to_begin():
    done = quantkit()
    assert (done.code, done.err) == (0, "")
    assert "quantkit convert demo" in done.out
    assert quantkit("--version").out == f"quantkit {version(DISTRIBUTION)}\n"


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
