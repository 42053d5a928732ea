"""Progress where nobody watches: plain lines for a log; nothing under --quiet, and no word of libraries otherwise."""

import re
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from tiny_models import CALIBRATION_FLAGS, EVALUATION_FLAGS, command_line, save_tiny

from quantkit.cli.progress import Lines, duration
from quantkit.progress import Progress

LINE = re.compile(r"[^\r\x1b]+: (done, \d+ s|done, \d+:\d\d min|\d+% after \d.*)")


def test_lines_of_a_log() -> None:
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


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.4, 59.6, 61, 3599, 3600, 7260)] == [
        *("0 s", "59 s", "1:00 min", "1:01 min", "59:59 min", "1:00 h", "2:01 h"),
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("method", ["gptq", "nf4", "ctranslate2", "gguf"])
def test_a_conversion_into_a_log_is_one_line_a_step(method: str, tiny: Path, tmp_path: Path) -> None:
    done = command_line("convert", tiny, "--method", method, "--out", tmp_path / "out", *CALIBRATION_FLAGS)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert all(LINE.fullmatch(line) for line in lines), done.stderr
    assert "reading the artifact back: done, " in done.stderr


def test_a_comparison_tells_whose_steps_they_are(tiny: Path, tmp_path: Path) -> None:
    words = ("compare", tiny, "--methods", "rtn:4", *EVALUATION_FLAGS, "--threads", "1", "--out", tmp_path / "out")
    done = command_line(*words)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stderr.splitlines() if ": perplexity " in line and " ms/token @ 1 thread" in line]
    assert [row.split(":")[0] for row in rows] == ["bfloat16", "rtn-4"]
    first, *others = done.stderr.splitlines()
    assert first.startswith("judged whole: "), done.stderr
    assert all(LINE.fullmatch(line) for line in others if line not in rows), done.stderr
    for part in ("rtn-4: rtn: rounding layers: ", "rtn-4: perplexity (llama.cpp): ", "bfloat16: speed at 1 thread: "):
        assert part in done.stderr, done.stderr


def test_quiet_is_the_result_alone(tiny: Path, tmp_path: Path) -> None:
    done = command_line("convert", tiny, "--method", "ctranslate2", "--out", tmp_path / "out", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert str(tmp_path / "out") in done.stdout


def test_verbose_lets_libraries_speak(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)  # what an earlier test's command has set
    done = command_line("convert", tiny, "--method", "ctranslate2", "--out", tmp_path / "out", "--verbose")
    assert done.returncode == 0
    assert "Token indices sequence length" in done.stderr


def test_both_at_once_are_refused(tiny: Path) -> None:
    done = command_line("convert", tiny, "--method", "rtn", "--quiet", "--verbose")
    assert done.returncode == 2
    assert "exclude each other" in done.stderr


def test_without_a_command_it_says_how_to_begin() -> None:
    done = command_line()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    for command in ("convert demo", "eval-ppl", "compare demo", "--help"):
        assert f"quantkit {command}" in done.stdout


def test_its_version() -> None:
    done = command_line("--version")
    assert done.stdout == f"quantkit {version('quantkit')}\n"
