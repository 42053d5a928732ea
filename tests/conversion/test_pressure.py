"""Conversions under a limit of memory, into a folder that cannot be written, and two at once.

A full disk is in test_bad_input.py, kills are in test_resume.py.
"""

import os
from functools import partial
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_AS, setrlimit

import psutil
import pytest
from killed import started
from test_resume import digests
from tiny_models import CALIBRATION_FLAGS, FLOAT_METHODS, save_tiny

from quantkit.conversion.verify import verify

MB = 1 << 20
METHODS = [name for name in FLOAT_METHODS if name != "float"]
NOBODY = 65534


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=6)


def command(model: Path, method: str, out: Path) -> list[str]:
    return [str(part) for part in ("convert", model, "--method", method, "--out", out, *CALIBRATION_FLAGS)]


def limit(room: int) -> None:
    size = psutil.Process().memory_info().vms + room * MB
    setrlimit(RLIMIT_AS, (size, RLIM_INFINITY))


@pytest.mark.parametrize("method", METHODS)
def test_a_limit_of_memory(method: str, tmp_path: Path) -> None:
    """Whatever call is the one that gets no memory: one line, or a whole artifact."""
    wrote, ended = tmp_path / "log", {}
    large = save_tiny(tmp_path / "large", vocab_size=40_000 if method == "gguf" else 200_000)
    for room in (0, 5, 10, 20, 40, 80, 160, 6000):
        out = tmp_path / f"out-{room}"
        child = started(command(large, method, out), wrote, partial(limit, room))
        said = child.wait()
        ended[room] = child.code
        assert child.code in (0, 1), (room, child.code, said)
        if child.code:
            assert "Traceback" not in said, (room, said)
            assert said.count("error: ") == 1, (room, said)
            assert not out.exists()
        else:
            verify(out)
    assert ended[6000] == 0
    assert 1 in ended.values(), "no limit was small enough to be felt"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody who may not write there")
def test_a_folder_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o755)
    for path in (tiny, *tiny.iterdir(), *tiny.parents, *tmp_path.parents, tmp_path):
        if path.is_relative_to(tmp_path.parents[2]):
            path.chmod(path.stat().st_mode | 0o055)

    child = started(command(tiny, "rtn", place / "out"), tmp_path / "log", partial(os.setuid, NOBODY))
    said = child.wait()
    assert child.code == 1
    assert said.count("\n") == 1, said
    assert said.startswith("error: ")
    assert str(place) in said
    assert "too small" not in said
    assert list(place.iterdir()) == []


def test_two_conversions_into_one_folder(tiny: Path, tmp_path: Path) -> None:
    alone = started(command(tiny, "rtn", tmp_path / "alone"), tmp_path / "log")
    assert (alone.wait(), alone.code) == ("", 0)
    expected, out = digests(tmp_path / "alone"), tmp_path / "out"
    children = [started(command(tiny, "rtn", out), tmp_path / f"log-{i}") for i in range(4)]
    said = {child.wait(): child.code for child in children}
    assert 0 in said.values(), said
    for text, code in said.items():
        if code:
            assert text.count("\n") == 1, text
            assert "is being written by process" in text or "exists" in text, text
    assert digests(out) == expected
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("method", ["gptq", "gguf", "ctranslate2"])
def test_two_conversions_of_one_source(method: str, tiny: Path, tmp_path: Path) -> None:
    children = [started(command(tiny, method, tmp_path / f"out-{i}"), tmp_path / f"log-{i}") for i in range(2)]
    assert [(child.wait(), child.code) for child in children] == [("", 0)] * 2
    assert digests(tmp_path / "out-0") == digests(tmp_path / "out-1")
