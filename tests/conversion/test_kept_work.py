"""Whatever ends a conversion, finished blocks stay, unless it is a finding against the artifact; and memory is told.

Limits of memory and of rights, and two conversions at once; a full disk is in test_bad_input.py, kills in
test_resume.py.
"""

import os
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from killed import started
from tiny_models import CALIBRATION_FLAGS, quantkit, save_tiny

from quantkit import convert, verify
from quantkit.artifact import CARD
from quantkit.checkpoints.journal import read_journal
from quantkit.checkpoints.spool import Spool
from quantkit.errors import ArtifactError, QuantkitError, UnsupportedError, shortage_of
from quantkit.system.memory import available_memory

pytestmark = pytest.mark.usefixtures("here")
BLOCKS = 3
TOO_MUCH = 1 << 58  # bytes; no address space holds them
NOBODY = 65534


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def whole(tiny: Path, once: Callable[..., Path]) -> dict[str, bytes]:
    return contents(once("rtn of no calibration", lambda folder: convert(str(tiny), "rtn", out=folder)))


def after_the_second_block(action: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    plain = Spool.finish_block

    def noted(spool: Spool, index: int, state: Any) -> None:
        plain(spool, index, state)
        if index == 1:
            action()

    patch.setattr(Spool, "finish_block", noted)


def damage_source() -> None:
    data = Path("tiny/model.safetensors").read_bytes()
    Path("tiny/model.safetensors").write_bytes(data[: len(data) // 8])


REAL: dict[str, tuple[Callable[[], object], type[BaseException]]] = {
    "the source is damaged meanwhile": (damage_source, QuantkitError),
    "torch finds no memory": (lambda: torch.empty(TOO_MUCH, dtype=torch.uint8), RuntimeError),
    "numpy finds no memory": (lambda: np.empty(TOO_MUCH, dtype=np.uint8), MemoryError),
    "Python finds no memory": (lambda: bytearray(TOO_MUCH), MemoryError),
    "a mistake in the code": (lambda: {}["nothing"], KeyError),
}


@pytest.mark.parametrize("kind", ["the source is damaged meanwhile", "torch finds no memory", "a mistake in the code"])
def test_finished_blocks_stay_and_the_next_run_gives_the_same_bytes(
    kind: str, tiny: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    action, error = REAL[kind]
    shutil.copytree(tiny, "tiny")
    with monkeypatch.context() as patch:
        after_the_second_block(action, patch)
        with pytest.raises(error):
            convert("tiny", "rtn", out="out")
    assert len(read_journal(Path("out.partial"))[0]) == 2
    shutil.copyfile(tiny / "model.safetensors", "tiny/model.safetensors")
    ended = quantkit("convert", "tiny", "--method", "rtn", "--out", "out")
    assert ended.err == "going on after 2 finished decoder blocks in out.partial\n"
    assert contents(Path("out")) == whole


def test_a_card_that_cannot_be_written_does_not_cost_the_work(
    tiny: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something of that name lies in its place when all blocks are done."""
    with monkeypatch.context() as patch:
        after_the_second_block(lambda: Path("out.partial", CARD).mkdir(), patch)
        ended = quantkit("convert", tiny, "--method", "rtn", "--out", "out")
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert f"{BLOCKS} finished decoder blocks kept in out.partial" in ended.err
    ended = quantkit("convert", tiny, "--method", "rtn", "--out", "out")
    assert ended.err == f"going on after {BLOCKS} finished decoder blocks in out.partial\n"
    assert contents(Path("out")) == whole


@pytest.mark.parametrize("error", [ArtifactError, UnsupportedError])
def test_a_finding_against_the_artifact_is_not_kept(
    error: type[QuantkitError], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find() -> None:
        raise error("values that cannot be written")

    after_the_second_block(find, monkeypatch)
    with pytest.raises(error):
        convert(str(tiny), "rtn", out="out")
    assert list(Path.cwd().iterdir()) == []


# Memory


@pytest.mark.parametrize("kind", ["torch finds no memory", "numpy finds no memory", "Python finds no memory"])
def test_a_lack_of_memory_is_one_line(kind: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after_the_second_block(REAL[kind][0], monkeypatch)
    ended = quantkit("convert", tiny, "--method", "rtn", "--out", "out")
    assert ended.code == 1
    kept, line = ended.err.splitlines()
    assert kept.startswith("2 finished decoder blocks kept in out.partial. The same command goes on from there")
    assert line.startswith("error: ResourceError: the memory that this process may take ran out")
    asked = {"torch": f"{TOO_MUCH} bytes more were asked for", "numpy": "256. PiB more were asked for"}
    assert asked.get(kind.split()[0], "MemoryError") in line


def test_what_says_that_memory_ran_out() -> None:
    for told in (
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        OSError(12, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        SystemError("<built-in function empty> returned NULL without setting an exception"),
    ):
        assert shortage_of(told) is not None
    outer = ValueError("a layer failed")
    outer.__cause__ = MemoryError()
    assert shortage_of(outer) is not None
    for other in (ValueError("x"), KeyError("memory"), OSError(28, "No space left on device"), SystemError("a bug")):
        assert shortage_of(other) is None
    circle = ValueError("x")
    circle.__context__ = KeyError("y")
    circle.__context__.__context__ = circle
    assert shortage_of(circle) is None


def command(model: Path, method: str, out: object) -> list[str]:
    return [str(part) for part in ("convert", model, "--method", method, "--out", out, *CALIBRATION_FLAGS)]


def limit(more: int) -> None:
    """Let the process take so many bytes of addresses more than it has."""
    has = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (has + more, has + more))
    assert available_memory() <= more


@pytest.mark.parametrize(
    "method",
    ["rtn", "gptq", *(pytest.param(m, marks=pytest.mark.slow) for m in ("awq", "nf4", "int8", "gguf", "ctranslate2"))],
)
def test_a_limit_of_memory(method: str, tmp_path: Path) -> None:
    """Whatever call is the one that gets no memory: one line, or a whole artifact. The user overrules the forecast."""
    large = save_tiny(tmp_path / "large", vocab_size=200_000, num_hidden_layers=1)
    codes = {}
    for room in (0, 20, 80, 160, 6000):
        out = tmp_path / f"out-{room}"
        arguments = [*command(large, method, out), "--max-memory-gb", "100"]
        child = started(arguments, tmp_path / "log", partial(limit, room << 20))
        said = child.wait()
        codes[room] = child.code
        assert child.code in (0, 1), (room, child.code, said)
        if child.code:
            assert "Traceback" not in said, (room, said)
            assert said.count("error: ") == 1, (room, said)
            assert not out.exists()
        else:
            verify(out)
    assert codes[6000] == 0
    assert 1 in codes.values(), "no limit was small enough to be felt"


def test_a_limit_of_addresses_is_known_before_the_work(tiny: Path, tmp_path: Path) -> None:
    arguments = ["convert", str(tiny), "--method", "gptq", "--out", "out"]
    child = started(arguments, tmp_path / "log", partial(limit, 80_000_000))
    err = child.wait()
    assert child.code == 1, err
    assert err.startswith("error: ResourceError: ")
    assert "of memory" in err or "ran out" in err
    assert err.count("\n") == 1
    assert not Path("out.partial").exists()


# Rights, and two at once


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody who may not write there")
def test_a_folder_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    place, model = tmp_path / "place", shutil.copytree(tiny, tmp_path / "model")
    place.mkdir(mode=0o755)
    for path in (model, *model.iterdir(), *tmp_path.parents, tmp_path):
        if path.is_relative_to(tmp_path.parents[2]):
            path.chmod(path.stat().st_mode | 0o055)

    child = started(command(model, "rtn", place / "out"), tmp_path / "log", partial(os.setuid, NOBODY))
    said = child.wait()
    assert child.code == 1
    assert said.count("\n") == 1, said
    assert said.startswith("error: ")
    assert str(place) in said
    assert "too small" not in said
    assert list(place.iterdir()) == []


def test_two_conversions_into_one_folder(tiny: Path, tmp_path: Path) -> None:
    children = [started(command(tiny, "rtn", "out"), tmp_path / f"log-{i}") for i in range(4)]
    said = {child.wait(): child.code for child in children}
    assert 0 in said.values(), said
    for text, code in said.items():
        if code:
            assert text.count("\n") == 1, text
            assert "is being written by process" in text or "exists" in text, text
    alone = quantkit(*command(tiny, "rtn", "alone"))
    assert alone.code == 0
    assert contents(Path("out")) == contents(Path("alone"))
    assert not Path("out.partial").exists()


@pytest.mark.parametrize(
    "method", ["gptq", *(pytest.param(m, marks=pytest.mark.slow) for m in ("gguf", "ctranslate2"))]
)
def test_two_conversions_of_one_source(method: str, tiny: Path, tmp_path: Path) -> None:
    children = [started(command(tiny, method, f"out-{i}"), tmp_path / f"log-{i}") for i in range(2)]
    assert [(child.wait(), child.code) for child in children] == [("", 0)] * 2
    assert contents(Path("out-0")) == contents(Path("out-1"))
