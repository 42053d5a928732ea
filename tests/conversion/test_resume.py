"""A conversion that is killed at any moment goes on where it was, and its artifact is byte for byte the same."""

import dataclasses
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from edits import contents, put
from killed import Ends, started
from tiny_models import conversion_by, succeeds

from quantkit import convert, verify
from quantkit.checkpoints.spool import JOURNAL, SPOOL, CheckpointWriter, Spool, line_of, read_journal
from quantkit.conversion import convert as conversion
from quantkit.conversion.staging import OWNER, WORK
from quantkit.errors import OutputError
from quantkit.methods import rtn
from quantkit.records.artifact import MANIFEST

BLOCKS = 4
STORED = {"rtn": 28, "gptq": 28, "awq": 23}  # tensors of a decoder block


@pytest.fixture(scope="module")
def model(tiny_with):
    return tiny_with(num_hidden_layers=BLOCKS)


@pytest.fixture(scope="module")
def whole_of(model, artifact_of):
    """The files of the uninterrupted artifact of a method."""
    return lambda method: contents(artifact_of(method, model=model).folder)


POINTS = {
    "before the first block is noted": (0, Ends(Spool, "finish_block")),
    "after the third block is noted": (3, Ends(Spool, "finish_block", 2, after=True)),
    "in the middle of the fourth block": (3, Ends(Spool, "add")),
    "before the shards are written": (BLOCKS, Ends(CheckpointWriter, "finish")),
    "in the middle of a shard": (BLOCKS, Ends(Spool, "copy", 20)),
    "while the artifact is read back": (BLOCKS, Ends(conversion, "check_values")),
    "before the manifest": (BLOCKS, Ends(conversion, "replace_text")),
    "after the manifest": (BLOCKS, Ends(conversion, "replace_text", after=True)),
    "when the spool is removed": (0, Ends(Path, "unlink", after=True)),
    "before the rename": (0, Ends(Path, "rename")),
    "after the rename": (0, Ends(Path, "rename", after=True)),
}


# What is noted and written is the same for all methods; what is computed again within a block is each one's own.
@pytest.mark.parametrize(
    ("method", "point"),
    [
        *(("rtn", point) for point in POINTS),
        ("gptq", "in the middle of the fourth block"),
        ("awq", "in the middle of the fourth block"),
        *(pytest.param("gptq", p, marks=pytest.mark.slow) for p in POINTS if p != "in the middle of the fourth block"),
    ],
)
def test_a_kill_at_a_chosen_point(point, method, model, whole_of, tmp_path):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    blocks, ends = POINTS[point]
    if point == "in the middle of the fourth block":
        ends = dataclasses.replace(ends, calls=3 * STORED[method] + 9)
    started(conversion_by(method, model, out), tmp_path / "log", ends).wait(-signal.SIGKILL)
    if point != "after the rename":
        assert not out.exists()
        assert len(read_journal(partial)[0]) == blocks
        stderr = succeeds(*conversion_by(method, model, out)).err
        if point in ("after the manifest", "when the spool is removed"):
            assert stderr == f"the artifact in {partial} is already complete\n"
        elif blocks:
            assert stderr == f"resuming from {partial}: {blocks} finished decoder blocks\n"
    assert contents(out) == whole_of(method)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "out"]


@pytest.mark.parametrize(
    ("method", "seed"),
    [("gptq", 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("rtn", 0), ("awq", 0), ("gptq", 1)))],
)
def test_random_kills(method, seed, model, whole_of, tmp_path):
    """Each time another tensor is the last that was stored, until the rest is fewer tensors than were asked for."""
    draw = random.Random(seed)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    finished = []
    while not out.exists():
        assert len(finished) < 20, f"it never comes to an end: {finished}"
        tensor = draw.randrange(STORED[method] * BLOCKS // 2)
        ends = Ends(Spool, "add", tensor, after=draw.random() < 0.5)
        child = started(conversion_by(method, model, out), tmp_path / "log", ends)
        stderr = child.wait()
        assert child.code in (0, -signal.SIGKILL), stderr
        if child.code:
            finished.append(len(read_journal(partial)[0]))
    assert finished == sorted(finished)
    assert 0 < finished[-1] < BLOCKS
    assert contents(out) == whole_of(method)
    assert not partial.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_conversion_says_how_to_go_on(number, code, model, tmp_path):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    ends = Ends(Spool, "finish_block", 2, after=True, number=number)
    stderr = started(conversion_by("rtn", model, out), tmp_path / "log", ends).wait(code)
    assert "Traceback" not in stderr
    assert f"{partial} has 3 finished decoder blocks. Run the same command to continue" in stderr
    assert ": 3 finished" in succeeds(*conversion_by("rtn", model, out)).err
    verify(out)


@pytest.fixture(scope="module")
def stopped(model, tmp_path_factory):
    """The staging folder of an RTN conversion that was killed after its third block."""
    folder = tmp_path_factory.mktemp("stopped")
    _, ends = POINTS["after the third block is noted"]
    started(conversion_by("rtn", model, folder / "out"), folder / "log", ends).wait(-signal.SIGKILL)
    return folder / "out.partial"


@pytest.fixture
def partial(stopped, tmp_path):
    """A copy of it, for the output `out`."""
    return Path(shutil.copytree(stopped, tmp_path / "out.partial"))


def append_to_both(partial):
    for name in (JOURNAL, SPOOL):
        with (partial / name).open("ab") as file:
            file.write(b'{"block": 3, "end"')


def damage_end(path):
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\xff\x00\xff\x00")


def stray_files(partial):
    (partial / "model-00001-of-00009.safetensors").write_bytes(b"half a shard")
    (partial / f"{MANIFEST}.new").write_bytes(b"{")
    (partial / "converted").mkdir()
    (partial / "converted" / "model.bin").write_bytes(b"half")


def change_line(change):
    """Another second line in the journal, whose checksum is right."""

    def damage(partial):
        first, line, *_ = read_journal(partial)[0]
        change(line)
        (partial / JOURNAL).write_text(line_of(first) + line_of(line))

    return damage


def cut(name, count):
    return lambda partial: os.truncate(partial / name, (partial / name).stat().st_size - count)


@pytest.mark.parametrize(
    ("damage", "blocks"),
    [
        (cut(JOURNAL, 7), 2),
        (append_to_both, 3),
        (cut(SPOOL, 1), 2),
        (lambda partial: damage_end(partial / SPOOL), 2),
        (lambda partial: (partial / JOURNAL).unlink(), 0),
        (stray_files, 3),
        (lambda partial: (partial / OWNER).write_text("1"), 3),  # a recycled process number, which is always alive
        (change_line(put("tensors", 0, 1, value="F7")), 1),
        (change_line(put("state", value={"notes": [1], "tensor_types": 3})), 0),
        (lambda partial: (partial / WORK).write_bytes(b"[" * 100_000), 0),
    ],
    ids=["journal", "both", "cut", "spool", "lost", "stray", "owner", "type", "state", "deep"],
)
def test_a_damaged_work_folder_gives_the_same_artifact(damage, blocks, partial, model, whole_of, monkeypatch):
    damage(partial)
    rounded, whole = [], whole_of("rtn")
    before = rtn.round_layer
    monkeypatch.setattr(rtn, "round_layer", lambda *given: rounded.append(given) or before(*given))
    succeeds(*conversion_by("rtn", model, partial.with_name("out")))
    assert contents(partial.with_name("out")) == whole
    assert len(rounded) == (BLOCKS - blocks) * 7


def test_a_whole_artifact_with_a_damaged_file_is_not_renamed(model, tmp_path):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    _, ends = POINTS["after the manifest"]
    started(conversion_by("rtn", model, out), tmp_path / "log", ends).wait(-signal.SIGKILL)
    damage_end(partial / "model.safetensors")
    told = succeeds(*conversion_by("rtn", model, out)).err
    assert told == f"resuming from {partial}: {BLOCKS} finished decoder blocks\n"
    verify(out)


def test_another_conversion_clears_the_work_and_says_so(partial, model):
    out = partial.with_name("out")
    assert succeeds(*conversion_by("rtn", model, out), "--bits", "8").err.startswith(
        f"removed from {partial}: 3 finished decoder blocks of another conversion (differing in recipe)\n"
    )
    assert verify(out).manifest.recipe.bits == "8"


def test_a_line_with_any_other_byte_does_not_count(partial):
    """A flipped bit in the name of a tensor leaves JSON that looks like a journal's."""
    first, second, *_ = (partial / JOURNAL).read_bytes().splitlines(keepends=True)
    assert second == line_of(read_journal(partial)[0][1]).encode()
    for place in range(len(second)):
        flipped = bytearray(second)
        flipped[place] ^= 1
        (partial / JOURNAL).write_bytes(first + flipped)
        assert len(read_journal(partial)[0]) == 1, place


def test_what_is_not_ours_is_left_alone(tiny, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.txt").write_text("years of work")
    shutil.copytree(tmp_path / "elsewhere", tmp_path / "out.partial")
    with pytest.raises(OutputError, match="not a work folder of quantkit"):
        convert(str(tiny), "rtn", out=tmp_path / "out")
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "years of work"
    shutil.rmtree(tmp_path / "out.partial")
    (tmp_path / "elsewhere" / WORK).write_text("{}")
    (tmp_path / "out.partial").symlink_to("elsewhere")
    with pytest.raises(OutputError, match=r"out\.partial is not a plain file or folder"):
        convert(str(tiny), "rtn", out=tmp_path / "out")
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2


PLANTED = {
    **{
        f"a link called {name}": (name, lambda path, target: path.symlink_to(target))
        for name in (OWNER, f"{WORK}.new", SPOOL, "model.safetensors")
    },
    "a hard link": (SPOOL, lambda path, target: os.link(target, path)),
    "a pipe": (WORK, lambda path, _: os.mkfifo(path)),
    "a folder": (JOURNAL, lambda path, _: path.mkdir()),
    "a link in a folder": ("inner", lambda path, target: (path.mkdir(), (path / "link").symlink_to(target))),
}


@pytest.mark.parametrize("what", PLANTED)
def test_planted_things_are_refused_and_what_they_lead_to_is_kept(what, tiny, tmp_path):
    target, partial = tmp_path / "diary.txt", tmp_path / "out.partial"
    target.write_text("dear diary")
    partial.mkdir()
    (partial / WORK).write_text("{}")
    name, plant = PLANTED[what]
    (partial / name).unlink(missing_ok=True)
    plant(partial / name, target)
    with pytest.raises(OutputError, match=rf"{name}.* is not a plain file or folder"):
        convert(str(tiny), "rtn", out=tmp_path / "out")
    assert target.read_text() == "dear diary"
    assert os.path.lexists(partial / name)
