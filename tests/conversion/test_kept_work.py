"""Whatever ends a conversion, finished blocks stay, unless it is a finding against the artifact; and memory is told."""

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
from tiny_models import quantkit, save_tiny

from quantkit import convert
from quantkit.artifact import CARD
from quantkit.checkpoints.journal import read_journal
from quantkit.checkpoints.spool import Spool
from quantkit.errors import ArtifactError, QuantkitError, UnsupportedError, shortage_of
from quantkit.system.memory import available_memory

BLOCKS = 4
TOO_MUCH = 1 << 58  # bytes; no address space holds them


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=BLOCKS)


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(convert(str(tiny), "rtn", out=tmp_path_factory.mktemp("whole") / "out").folder)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def after_the_third_block(action: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    plain = Spool.finish_block

    def noted(spool: Spool, index: int, state: Any) -> None:
        plain(spool, index, state)
        if index == 2:
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


@pytest.mark.parametrize("kind", REAL)
def test_finished_blocks_stay_and_the_next_run_gives_the_same_bytes(
    kind: str, tiny: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    action, error = REAL[kind]
    shutil.copytree(tiny, "tiny")
    with monkeypatch.context() as patch:
        after_the_third_block(action, patch)
        with pytest.raises(error):
            convert("tiny", "rtn", out="out")
    assert len(read_journal(Path("out.partial"))[0]) == 3
    shutil.copyfile(tiny / "model.safetensors", "tiny/model.safetensors")
    ended = quantkit("convert", "tiny", "--method", "rtn", "--out", "out")
    assert ended.err == "going on after 3 finished decoder blocks in out.partial\n"
    assert contents(Path("out")) == whole


def test_a_card_that_cannot_be_written_does_not_cost_the_work(
    tiny: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something of that name lies in its place when all blocks are done."""
    with monkeypatch.context() as patch:
        after_the_third_block(lambda: Path("out.partial", CARD).mkdir(), patch)
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

    after_the_third_block(find, monkeypatch)
    with pytest.raises(error):
        convert(str(tiny), "rtn", out="out")
    assert list(Path.cwd().iterdir()) == []


# Memory


@pytest.mark.parametrize("kind", ["torch finds no memory", "numpy finds no memory", "Python finds no memory"])
def test_a_lack_of_memory_is_one_line(kind: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after_the_third_block(REAL[kind][0], monkeypatch)
    ended = quantkit("convert", tiny, "--method", "rtn", "--out", "out")
    assert ended.code == 1
    kept, line = ended.err.splitlines()
    assert kept.startswith("3 finished decoder blocks kept in out.partial. The same command goes on from there")
    assert line.startswith("error: ResourceError: the memory that this process may take ran out")
    asked = {"torch": f"{TOO_MUCH} bytes more were asked for", "numpy": "256. PiB more were asked for"}
    assert asked.get(kind.split()[0], "MemoryError") in line


def raised_by(action: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        action()
    return caught.value


def test_what_says_that_memory_ran_out() -> None:
    for action in (lambda: torch.empty(TOO_MUCH), lambda: np.empty(TOO_MUCH), lambda: bytearray(TOO_MUCH)):
        assert shortage_of(raised_by(action)) is not None
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


def limit(more: int) -> None:
    """Let the process take so many bytes of addresses more than it has."""
    has = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (has + more, has + more))
    assert available_memory() <= more


def test_a_limit_of_addresses_is_known_before_the_work(tiny: Path, tmp_path: Path) -> None:
    child = started(
        ["convert", str(tiny), "--method", "gptq", "--out", "out"], tmp_path / "log", partial(limit, 80_000_000)
    )
    err = child.wait()
    assert child.code == 1, err
    assert err.startswith("error: ResourceError: ")
    assert "of memory" in err or "ran out" in err
    assert err.count("\n") == 1
    assert not Path("out.partial").exists()


def test_a_limit_that_the_work_meets_is_one_line(tmp_path: Path) -> None:
    """An embedding that is larger than what the process may take, where the user overrules the forecast."""
    wide = save_tiny(tmp_path / "wide", vocab_size=400_000, num_hidden_layers=1)
    arguments = ["convert", str(wide), "--method", "rtn", "--out", "out", "--max-memory-gb", "100"]
    child = started(arguments, tmp_path / "log", partial(limit, 30_000_000))
    err = child.wait()
    assert child.code == 1, err
    assert "Traceback" not in err
    assert "error: ResourceError: " in err
    assert "memory" in err
    assert not Path("out").exists()
