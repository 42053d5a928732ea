"""Whatever ends a conversion, finished blocks stay; and a lack of memory is told."""

import os
import resource
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from edits import contents
from killed import started
from tiny_models import conversion_by, fails, quantkit, save_tiny

from quantkit import convert, verify
from quantkit.checkpoints.spool import Spool, read_journal
from quantkit.errors import QuantkitError, shortage_of
from quantkit.system.memory import available_memory

pytestmark = pytest.mark.usefixtures("here")
TOO_MUCH = 1 << 58  # bytes; no address space holds them
NOBODY = 65534


def after_the_second_block(action, patch):
    plain = Spool.finish_block

    def noted(spool, index, state):
        plain(spool, index, state)
        if index == 1:
            action()

    patch.setattr(Spool, "finish_block", noted)


def damage_source():
    data = Path("tiny/model.safetensors").read_bytes()
    Path("tiny/model.safetensors").write_bytes(data[: len(data) // 8])


@pytest.mark.parametrize(("action", "error"), [(damage_source, QuantkitError), (lambda: {}["nothing"], KeyError)])
def test_finished_blocks_stay_and_the_next_run_gives_the_same_bytes(action, error, tiny, monkeypatch):
    convert(str(tiny), "rtn", out="whole")
    shutil.copytree(tiny, "tiny")
    with monkeypatch.context() as patch:
        after_the_second_block(action, patch)
        with pytest.raises(error):
            convert("tiny", "rtn", out="out")
    assert len(read_journal(Path("out.partial"))[0]) == 2
    shutil.copyfile(tiny / "model.safetensors", "tiny/model.safetensors")
    ended = quantkit("convert", "tiny", "--method", "rtn", "--out", "out")
    assert ended.err == "resuming from out.partial: 2 finished decoder blocks\n"
    assert contents(Path("out")) == contents(Path("whole"))


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (lambda: torch.empty(TOO_MUCH, dtype=torch.uint8), f"{TOO_MUCH} bytes more were requested"),
        (lambda: np.empty(TOO_MUCH, dtype=np.uint8), "256. PiB more were requested"),
        (lambda: bytearray(TOO_MUCH), "MemoryError"),
    ],
    ids=["torch", "numpy", "Python"],
)
def test_a_lack_of_memory_is_one_line(action, says, tiny, monkeypatch):
    after_the_second_block(action, monkeypatch)
    kept, line = fails("convert", tiny, "--method", "rtn", "--out", "out").err.splitlines()
    assert kept.startswith("out.partial has 2 finished decoder blocks. Run the same command to continue")
    assert line.startswith("error: ResourceError: this process ran out of memory")
    assert says in line


def test_what_says_that_memory_ran_out():
    outer, circle = ValueError("a layer failed"), ValueError("x")
    outer.__cause__ = MemoryError()
    circle.__context__ = KeyError("y")
    circle.__context__.__context__ = circle
    for told in (
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        SystemError("<built-in function empty> returned NULL without setting an exception"),
        outer,
    ):
        assert shortage_of(told) is not None
    for other in (ValueError("x"), OSError(28, "No space left on device"), SystemError("a bug"), circle):
        assert shortage_of(other) is None


def limit(more):
    """Let the process take so many bytes of addresses more than it has."""
    has = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (has + more, has + more))
    assert available_memory() <= more


@pytest.mark.parametrize(
    "method",
    ["rtn", "gptq", *(pytest.param(m, marks=pytest.mark.slow) for m in ("awq", "nf4", "int8", "gguf", "ctranslate2"))],
)
def test_a_limit_of_memory(method, tmp_path):
    """Whatever call is the one that gets no memory: one line, or a whole artifact. The user overrules the forecast."""
    large = save_tiny(tmp_path / "large", vocab_size=200_000, num_hidden_layers=1)
    codes = {}
    for room in (0, 20, 80, 160, 6000):
        out = tmp_path / f"out-{room}"
        arguments = [*conversion_by(method, large, out), "--max-memory-gb", "100"]
        child = started(arguments, tmp_path / "log", partial(limit, room << 20))
        said = child.wait()
        codes[room] = child.code
        if child.code == 127:  # the C library ends a process that has no room for a thread's variables
            assert "cannot allocate memory for thread-local data" in said, (room, said)
            assert not out.exists()
            continue
        assert child.code in (0, 1), (room, child.code, said)
        if child.code:
            assert "Traceback" not in said, (room, said)
            assert said.count("error: ") == 1, (room, said)
            assert not out.exists()
        else:
            verify(out)
    assert codes[6000] == 0
    assert 1 in codes.values(), "no limit was small enough to be felt"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody who may not write there")
def test_a_folder_that_cannot_be_written(tiny, tmp_path):
    place, model = tmp_path / "place", shutil.copytree(tiny, tmp_path / "model")
    place.mkdir(mode=0o755)
    for path in (model, *model.iterdir(), *tmp_path.parents, tmp_path):
        if path.is_relative_to(tmp_path.parents[2]):
            path.chmod(path.stat().st_mode | 0o055)

    said = started(conversion_by("rtn", model, place / "out"), tmp_path / "log", partial(os.setuid, NOBODY)).wait(1)
    assert said.count("\n") == 1, said
    assert said.startswith("error: ")
    assert str(place) in said
    assert "too small" not in said
    assert list(place.iterdir()) == []


def test_two_conversions_into_one_folder(tiny, tmp_path):
    children = [started(conversion_by("rtn", tiny, "out"), tmp_path / f"log-{i}") for i in range(4)]
    said = {child.wait(): child.code for child in children}
    assert 0 in said.values(), said
    for text, code in said.items():
        if code:
            assert text.count("\n") == 1, text
            assert "is being written by process" in text or "exists" in text, text
    assert quantkit(*conversion_by("rtn", tiny, "alone")).code == 0
    assert contents(Path("out")) == contents(Path("alone"))
    assert not Path("out.partial").exists()
