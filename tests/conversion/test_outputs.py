"""Where an artifact cannot be written, that is told before the work; and nothing of anybody else's is changed."""

import copy
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed import Ends, started
from tiny_models import SAMPLE, quantkit, save_tiny

from quantkit import convert, verify
from quantkit.artifact import MANIFEST
from quantkit.checkpoints.journal import JOURNAL, SPOOL, line_of, read_journal
from quantkit.checkpoints.spool import Spool
from quantkit.conversion.check import prepare_job
from quantkit.conversion.dry_run import dry_run
from quantkit.conversion.staging import OWNER, WORK, refuse_small_disk
from quantkit.errors import OutputError
from quantkit.sweep.compare import compare
from quantkit.system.files import replace_text

BLOCKS = 3


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
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tree(folder: Path) -> list[str]:
    return sorted(f"{path} -> {path.readlink()}" if path.is_symlink() else str(path) for path in folder.rglob("*"))


def refused(tiny: Path, out: object, *flags: object, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with one line before a layer is rounded, and leaves everything as it was."""
    before = tree(Path.cwd())
    with monkeypatch.context() as patch:
        patch.setattr("quantkit.methods.rtn.round_layer", lambda *_: pytest.fail("it worked"))
        for words in ([], ["--dry-run"]):
            ended = quantkit("convert", tiny, "--method", "rtn", "--out", out, *flags, *words)
            assert ended.code == 1, ended
            assert ended.err.startswith("error: OutputError: "), ended.err
            assert says in ended.err, ended.err
            assert ended.err.count("\n") == 1
    assert tree(Path.cwd()) == before


# Links and other things that are no folders


@pytest.mark.parametrize("flags", [[], ["--force"]])
@pytest.mark.parametrize("target", ["artifact", "empty", "nowhere", "link"])
def test_an_output_that_is_a_link_is_told_before_the_work(
    target: str, flags: list[str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(str(tiny), "rtn", out="artifact")
    Path("empty").mkdir()
    Path("link").symlink_to(target)
    before = contents(Path("artifact"))
    refused(tiny, "link", *flags, says="the output link is a link", monkeypatch=monkeypatch)
    assert contents(Path("artifact")) == before


@pytest.mark.parametrize("flags", [[], ["--force"]])
def test_a_place_that_is_no_folder_is_told_before_the_work(
    flags: list[str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").write_text("text")
    Path("dangling").symlink_to("nowhere")
    Path("circle").symlink_to("circle")
    for out in ("file/out", "file/a/b/out", "dangling/out", "dangling/a/out", "circle/out"):
        says = f"{out.partition('/')[0]} is no folder" if "circle" not in out else "circle/out"
        refused(tiny, out, *flags, says=says, monkeypatch=monkeypatch)
    for out in (".", "..", "", "/", "a/.."):
        refused(tiny, out, *flags, says="has no name of its own", monkeypatch=monkeypatch)
    refused(tiny, "x" * 250, *flags, says="name too long", monkeypatch=monkeypatch)
    refused(tiny, "x" * 300, *flags, says="name too long", monkeypatch=monkeypatch)


def test_a_link_above_the_output_is_followed(tiny: Path) -> None:
    Path("disk").mkdir()
    Path("models").symlink_to("disk")
    convert(str(tiny), "rtn", out="models/new/out")
    verify("disk/new/out")


def test_force_does_not_take_the_name_of_what_is_not_ours(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(str(tiny), "rtn", out="out")
    Path("out.replaced").mkdir()
    Path("out.replaced/thesis.txt").write_text("years of work")
    refused(tiny, "out", "--force", says="moves the old one to out.replaced", monkeypatch=monkeypatch)
    convert(str(tiny), "rtn", out="other")  # nobody needs the name there


@pytest.mark.parametrize("flags", [[], ["--force"]])
def test_a_link_that_has_the_name_is_told_before_the_work(
    flags: list[str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(str(tiny), "rtn", out="other")
    Path("out.replaced").symlink_to("other")
    refused(tiny, "out", *flags, says="out.replaced is a link", monkeypatch=monkeypatch)
    verify("other")


# The source


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("source", "the output source is the source"),
        ("source/out", "the output source/out lies in the source"),
        ("source/../source/a/b", "lies in the source"),
        ("alias/out", "lies in the source"),
    ],
)
def test_an_output_in_the_source_is_refused(out: str, says: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the source is an artifact itself, which --force would replace by its own copy."""
    convert(str(tiny), "float", "bfloat16", out="source")
    Path("alias").symlink_to("source")
    before = contents(Path("source"))
    refused(Path("source"), out, "--force", says=says, monkeypatch=monkeypatch)
    with pytest.raises(OutputError, match="the source"):
        compare("source", ["rtn"], out="source/compared", evaluation={"text": str(SAMPLE)})
    assert contents(Path("source")) == before


def test_an_output_that_holds_the_source_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(str(tiny), "gguf", "F16", out="all")
    file = next(Path("all").glob("*.gguf"))
    refused(file, "all", "--force", says="the output all holds the source", monkeypatch=monkeypatch)
    ended = quantkit("import", file, "--out", "all", "--force")
    assert ended.code == 1
    assert "the output all holds the source" in ended.err
    verify("all")


def test_an_output_beside_a_gguf_file_is_fine(tiny: Path) -> None:
    made = convert(str(tiny), "gguf", "F16", out="made").folder
    shutil.copy(next(made.glob("*.gguf")), "model.gguf")
    assert quantkit("convert", "model.gguf", "--method", "gguf", "--bits", "Q8_0", "--out", "out").code == 0


# The disk


def test_a_place_where_nothing_can_be_written_is_no_small_disk(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tiny, "/proc/out", says="nothing can be written in /proc", monkeypatch=monkeypatch)


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may write everywhere")
def test_a_folder_that_may_not_be_written_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("locked").mkdir(mode=0o555)
    refused(tiny, "locked/out", says="nothing can be written in", monkeypatch=monkeypatch)


def test_json_that_cannot_be_written_is_told_before_the_work(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tiny, "out", "--json", "/proc/made.json", says="written in /proc", monkeypatch=monkeypatch)


def test_what_is_needed_and_what_is_free_are_told_apart(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(OutputError) as error:
        refuse_small_disk(tmp_path / "out", free + 100_000)
    needed, there = str(error.value).split("too small: ")[1].split(" free")[0].split(" needed, ")
    assert needed != there


# What lies in OUT.partial


def plant(name: str, make: Callable[[Path], object]) -> Path:
    """Unfinished work with something of another's in it."""
    partial = Path("out.partial")
    partial.mkdir(exist_ok=True)
    (partial / WORK).write_text("{}")
    path = partial / name
    path.unlink(missing_ok=True)
    make(path)
    return path


@pytest.mark.parametrize(
    "name", [OWNER, WORK, f"{WORK}.new", JOURNAL, SPOOL, MANIFEST, f"{MANIFEST}.new", "README.md", "model.safetensors"]
)
def test_a_planted_link_is_refused_and_its_target_kept(name: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Path("diary.txt").absolute()
    target.write_text("dear diary")
    path = plant(name, lambda path: path.symlink_to(target))
    ended = quantkit("convert", tiny, "--method", "rtn", "--out", "out")
    assert ended.code == 1
    assert f"{path} is no file or folder of quantkit's" in ended.err
    assert target.read_text() == "dear diary"
    assert path.is_symlink()


def test_other_planted_things_are_refused(tiny: Path) -> None:
    target = Path("diary.txt")
    target.write_text("dear diary")
    for name, make in (
        (OWNER, lambda path: os.link(target, path)),
        (SPOOL, lambda path: os.link(target, path)),
        (WORK, os.mkfifo),
        (OWNER, os.mkfifo),
        (JOURNAL, Path.mkdir),
        (OWNER, Path.mkdir),
        ("inner", lambda path: (path.mkdir(), (path / "link").symlink_to(target.absolute()))),
    ):
        path = plant(name, make)
        ended = quantkit("convert", tiny, "--method", "rtn", "--out", "out")
        assert ended.code == 1
        assert f"{path}" in ended.err
        assert "is no file or folder of quantkit's" in ended.err
        assert target.read_text() == "dear diary"
        shutil.rmtree("out.partial")
    Path("elsewhere").mkdir()
    (Path("elsewhere") / WORK).write_text("{}")
    Path("out.partial").symlink_to("elsewhere")
    assert "out.partial is no file or folder of" in quantkit("convert", tiny, "--method", "rtn", "--out", "out").err
    assert [path.name for path in Path("elsewhere").iterdir()] == [WORK]


def test_a_text_is_replaced_without_following_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "a.json.new").symlink_to(tmp_path / "target")
    replace_text(tmp_path / "a.json", "new")
    assert (tmp_path / "target").read_text() == "kept"
    assert (tmp_path / "a.json").read_text() == "new"
    assert not (tmp_path / "a.json").is_symlink()


# Notes of earlier work


@pytest.fixture(scope="module")
def stopped(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The staging folder of a conversion that was killed after its second block."""
    folder = tmp_path_factory.mktemp("stopped")
    arguments = ["convert", str(tiny), "--method", "rtn", "--out", str(folder / "out")]
    child = started(arguments, folder / "log", Ends(Spool, "finish_block", 1, after=True))
    child.wait()
    return folder / "out.partial"


@pytest.fixture
def left(stopped: Path) -> Path:
    """A copy of it, for the output `out`."""
    return Path(shutil.copytree(stopped, "out.partial"))


def goes_on(tiny: Path, whole: dict[str, bytes]) -> None:
    ended = quantkit("convert", tiny, "--method", "rtn", "--out", "out")
    assert ended.code == 0, ended.err
    assert contents(Path("out")) == whole


@pytest.mark.parametrize("text", [b"[1]", b"\xff\x00", b"[" * 100_000, b'{"recipe": [1]}'])
def test_a_damaged_work_json_is_no_end(text: bytes, left: Path, tiny: Path, whole: dict[str, bytes]) -> None:
    (left / WORK).write_bytes(text)
    goes_on(tiny, whole)


def with_values(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda line: line.update(values)


def entry(index: int, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda line: line["tensors"][0].__setitem__(index, value)


LINES: list[Callable[[dict[str, Any]], object]] = [
    with_values(block="1"),
    with_values(block=True),
    with_values(end=None),
    with_values(end=-1),
    with_values(end=1.5),
    with_values(end=10**30),
    with_values(crc32="x"),
    with_values(tensors=None),
    with_values(tensors={"a": 1}),
    with_values(tensors=[[1]]),
    with_values(tensors=["abcd"]),
    with_values(state=[1]),
    with_values(state=None),
    with_values(more=1),
    lambda line: line.pop("state"),
    entry(0, 7),
    entry(1, "F7"),
    entry(1, ["F16"]),
    entry(2, "shape"),
    entry(2, [-1, 4]),
    entry(2, [10**20, 10**20]),
    entry(2, [1] * 100_000),
    entry(3, None),
    entry(3, -5),
    entry(3, 10**30),
]


def test_a_damaged_line_of_a_journal_does_not_count(left: Path) -> None:
    first, second = read_journal(left)[0]
    lines = (left / JOURNAL).read_bytes().splitlines(keepends=True)
    for change in LINES:
        line = copy.deepcopy(second)
        change(line)
        (left / JOURNAL).write_text(line_of(first) + line_of(line))
        assert read_journal(left) == ([first], len(lines[0]))
    for text in (b"[1]", b"3", b"null", b"[" * 100_000, b"\xff", b"{}", b""):
        for end in (b"\n", b" %08x\n" % zlib.crc32(text)):
            (left / JOURNAL).write_bytes(text + end + lines[1])
            assert read_journal(left) == ([], 0)


def test_a_line_with_any_other_byte_does_not_count(left: Path) -> None:
    """A flipped bit in the name of a tensor leaves JSON that looks like a journal's."""
    first, second = (left / JOURNAL).read_bytes().splitlines(keepends=True)
    assert second == line_of(read_journal(left)[0][1]).encode()
    for place in range(len(second)):
        flipped = bytearray(second)
        flipped[place] ^= 1
        (left / JOURNAL).write_bytes(first + flipped)
        assert len(read_journal(left)[0]) == 1, place


STATES: list[Any] = [
    {"notes": [1], "tensor_types": 3},
    {"notes": {}, "tensor_types": {"a": "x"}, "options": {}, "numbers": {}},
]


@pytest.mark.parametrize("change", [entry(1, "F7"), *(with_values(state=state) for state in STATES)])
def test_a_damaged_journal_gives_the_same_artifact(
    change: Callable[[dict[str, Any]], object], left: Path, tiny: Path, whole: dict[str, bytes]
) -> None:
    first, line = read_journal(left)[0]
    change(line)
    (left / JOURNAL).write_text(line_of(first) + line_of(line))
    goes_on(tiny, whole)


def test_a_dry_run_writes_nothing(tiny: Path) -> None:
    dry_run(prepare_job(str(tiny), "rtn"), "out")
    assert list(Path.cwd().iterdir()) == []
