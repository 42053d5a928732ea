"""A conversion that is killed at any moment goes on where it was, and its artifact is byte for byte the same."""

import dataclasses
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed import Ends, started
from tiny_models import SAMPLE, quantkit, save_tiny

from quantkit import verify
from quantkit.artifact import MANIFEST
from quantkit.checkpoints.journal import JOURNAL, SPOOL, read_journal
from quantkit.checkpoints.spool import Spool
from quantkit.checkpoints.writer import CheckpointWriter
from quantkit.conversion import convert as conversion
from quantkit.conversion.convert import convert
from quantkit.conversion.staging import OWNER, WORK, staged
from quantkit.errors import OutputError
from quantkit.system.files import sha256_of

BLOCKS = 6
FLAGS = ["--calibration-text", SAMPLE, "--calibration-sequences", 4, "--calibration-length", 32]
METHODS = {"rtn": 28, "gptq": 28, "awq": 23}  # stored tensors of a decoder block


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=BLOCKS)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in folder.iterdir()}


def command(model: Path, method: str, out: Path) -> list[str]:
    return [str(part) for part in ("convert", model, "--method", method, "--out", out, *FLAGS)]


def done(arguments: list[str], log: Path) -> str:
    """Run to the end; return what was told on standard error."""
    child = started(arguments, log)
    stderr = child.wait()
    assert child.code == 0, stderr
    return stderr


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(method: str, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """sha256 of every file of the uninterrupted artifact."""
    folder = tmp_path_factory.mktemp("whole")
    assert done(command(tiny, method, folder / "artifact"), folder / "log") == ""
    return digests(folder / "artifact")


# Chosen moments


def killed(arguments: list[str], log: Path, point: Ends) -> None:
    child = started(arguments, log, point)
    stderr = child.wait()
    assert child.code == -signal.SIGKILL, stderr


POINTS = {
    "before the first block is noted": (0, Ends(Spool, "finish_block")),
    "after the third block is noted": (3, Ends(Spool, "finish_block", 2, after=True)),
    "in the middle of the fourth block": (3, Ends(Spool, "add")),
    "before the shards are written": (BLOCKS, Ends(CheckpointWriter, "finish")),
    "in the middle of a shard": (BLOCKS, Ends(Spool, "copy", 20)),
    "after the shards are written": (BLOCKS, Ends(CheckpointWriter, "finish", after=True)),
    "while the artifact is read back": (BLOCKS, Ends(conversion, "check_values")),
    "before the manifest": (BLOCKS, Ends(conversion, "replace_text")),
    "after the manifest": (BLOCKS, Ends(conversion, "replace_text", after=True)),
    "when the spool is removed": (0, Ends(Path, "unlink", after=True)),
    "before the rename": (0, Ends(Path, "rename")),
    "after the rename": (0, Ends(Path, "rename", after=True)),
}


# What is noted and written is the same for all methods; what is computed again within a block is each one's own.
IN_BLOCKS = ["before the first block is noted", "in the middle of the fourth block", "before the shards are written"]


@pytest.mark.parametrize(
    ("method", "point"),
    [*(("gptq", point) for point in POINTS), *((name, point) for name in ("rtn", "awq") for point in IN_BLOCKS)],
    indirect=["method"],
    scope="module",
)
def test_a_kill_at_a_chosen_point(point: str, method: str, tiny: Path, whole: dict[str, str], tmp_path: Path) -> None:
    out, partial, log = tmp_path / "out", tmp_path / "out.partial", tmp_path / "log"
    blocks, ends = POINTS[point]
    if point == "in the middle of the fourth block":
        ends = dataclasses.replace(ends, calls=3 * METHODS[method] + 9)
    killed(command(tiny, method, out), log, ends)
    if point != "after the rename":
        assert not out.exists()
        assert len(read_journal(partial)[0]) == blocks
        stderr = done(command(tiny, method, out), log)
        if point in ("after the manifest", "when the spool is removed"):
            assert stderr == f"the artifact in {partial} is whole already\n"
        elif blocks:
            assert stderr == f"going on after {blocks} finished decoder blocks in {partial}\n"
    assert digests(out) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "out"]


# Random moments


@pytest.mark.parametrize("seed", [0, 1])
def test_random_kills(seed: int, method: str, tiny: Path, whole: dict[str, str], tmp_path: Path) -> None:
    """Each time another tensor is the last that was stored, until the rest is fewer tensors than were asked for."""
    draw = random.Random(seed)
    out, partial, log = tmp_path / "out", tmp_path / "out.partial", tmp_path / "log"
    finished = []
    while not out.exists():
        assert len(finished) < 20, f"it never comes to an end: {finished}"
        tensor = draw.randrange(METHODS[method] * BLOCKS // 2)
        child = started(command(tiny, method, out), log, Ends(Spool, "add", tensor, after=draw.random() < 0.5))
        stderr = child.wait()
        assert child.code in (0, -signal.SIGKILL), stderr
        if child.code:
            finished.append(len(read_journal(partial)[0]))
    assert finished == sorted(finished)
    assert 0 < finished[-1] < BLOCKS
    assert digests(out) == whole
    assert not partial.exists()


# What is left behind


@pytest.fixture
def left(tiny: Path, tmp_path: Path) -> Path:
    """The output of an RTN conversion that was killed after its third block."""
    killed(command(tiny, "rtn", tmp_path / "out"), tmp_path / "log", POINTS["after the third block is noted"][1])
    return tmp_path / "out"


def tear_journal(partial: Path) -> None:
    os.truncate(partial / JOURNAL, (partial / JOURNAL).stat().st_size - 7)


def append_to_both(partial: Path) -> None:
    for name in (JOURNAL, SPOOL):
        with (partial / name).open("ab") as file:
            file.write(b'{"block": 3, "end"')


def truncate_spool(partial: Path) -> None:
    os.truncate(partial / SPOOL, (partial / SPOOL).stat().st_size - 1)


def damage_spool(partial: Path) -> None:
    with (partial / SPOOL).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\xff\x00\xff\x00")


def lose_journal(partial: Path) -> None:
    (partial / JOURNAL).unlink()


def stray_files(partial: Path) -> None:
    (partial / "model-00001-of-00009.safetensors").write_bytes(b"half a shard")
    (partial / f"{MANIFEST}.new").write_bytes(b"{")
    (partial / "converted").mkdir()
    (partial / "converted" / "model.bin").write_bytes(b"half")


def test_a_whole_artifact_with_a_damaged_file_is_not_renamed(tiny: Path, tmp_path: Path) -> None:
    out, partial, log = tmp_path / "out", tmp_path / "out.partial", tmp_path / "log"
    killed(command(tiny, "rtn", out), log, POINTS["after the manifest"][1])
    with (partial / "model.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\xff")
    assert done(command(tiny, "rtn", out), log) == f"going on after {BLOCKS} finished decoder blocks in {partial}\n"
    verify(out)


@pytest.mark.parametrize(
    ("damage", "blocks"),
    [
        (tear_journal, 2),
        (append_to_both, 3),
        (truncate_spool, 2),
        (damage_spool, 2),
        (lose_journal, 0),
        (stray_files, 3),
    ],
)
def test_a_damaged_work_folder_gives_the_same_artifact(
    damage: Callable[[Path], None], blocks: int, left: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.methods import rtn

    damage(left.with_name("out.partial"))
    rounded = []
    before = rtn.round_layer

    def noted(*args: Any) -> Any:
        rounded.append(args)
        return before(*args)

    monkeypatch.setattr(rtn, "round_layer", noted)
    calibration = {"text": str(SAMPLE), "sequences": 4, "length": 32}
    convert(str(tiny), "rtn", out=left, calibration=calibration)
    assert len(rounded) == (BLOCKS - blocks) * 7
    convert(str(tiny), "rtn", out=left.with_name("whole"), calibration=calibration)
    assert digests(left) == digests(left.with_name("whole"))


def test_another_conversion_clears_the_work_and_says_so(left: Path, tiny: Path) -> None:
    ended = quantkit("convert", tiny, "--method", "rtn", "--bits", 8, "--out", left, *FLAGS)
    assert ended.code == 0
    partial = left.with_name("out.partial")
    assert ended.err.startswith(
        f"3 finished decoder blocks in {partial} belong to another conversion (differing in recipe) and are removed\n"
    )
    assert verify(left).manifest.recipe.bits == "8"


def test_another_source_clears_the_work(left: Path, tiny: Path, tmp_path: Path) -> None:
    work = left.with_name("out.partial") / WORK
    values = json.loads(work.read_text())
    work.write_text(json.dumps(values | {"source": {"config.json": "0" * 64}, "versions": {}}))
    ended = quantkit(*command(tiny, "rtn", left))
    assert "(differing in source, versions)" in ended.err


def test_a_change_of_the_calibration_text_clears_the_work(tiny: Path, tmp_path: Path) -> None:
    """The recipe names the text; its content decides."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    shutil.copyfile(SAMPLE, text)
    arguments = [*command(tiny, "gptq", out), "--calibration-text", str(text)]
    killed(arguments, tmp_path / "log", Ends(CheckpointWriter, "__init__"))
    before = json.loads((tmp_path / "out.partial" / WORK).read_text())
    text.write_text(SAMPLE.read_text()[5000:])
    killed(arguments, tmp_path / "log", Ends(CheckpointWriter, "__init__"))
    now = json.loads((tmp_path / "out.partial" / WORK).read_text())
    assert [key for key in before if before[key] != now[key]] == ["calibration"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_conversion_says_how_to_go_on(
    number: signal.Signals, code: int, tiny: Path, tmp_path: Path
) -> None:
    out, partial, log = tmp_path / "out", tmp_path / "out.partial", tmp_path / "log"
    child = started(command(tiny, "rtn", out), log, Ends(Spool, "finish_block", 2, after=True, number=number))
    stderr = child.wait()
    assert child.code == code
    assert "Traceback" not in stderr
    assert f"3 finished decoder blocks kept in {partial}. The same command goes on from there" in stderr
    assert "going on after 3" in done(command(tiny, "rtn", out), log)
    verify(out)


# Owners


def test_a_recycled_process_number_does_not_block(left: Path, tiny: Path) -> None:
    (left.with_name("out.partial") / OWNER).write_text("1")  # always alive
    assert "going on after 3" in done(command(tiny, "rtn", left), left.with_name("log"))


def test_a_second_writer_of_the_same_process_is_refused(tmp_path: Path) -> None:
    def write() -> None:
        with staged(tmp_path / "out", force=False):
            pass

    with (
        staged(tmp_path / "out", force=False),
        pytest.raises(OutputError, match=f"is being written by process {os.getpid()}"),
    ):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_somebody_else_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="no work folder of quantkit"):
        convert(str(tiny), "rtn", out=tmp_path / "out")
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "years of work"
