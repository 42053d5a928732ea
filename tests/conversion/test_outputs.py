"""Where an artifact cannot be written, that is told before the work; and nothing of anybody else's is changed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import SAMPLE, quantkit

from quantkit import convert, verify
from quantkit.artifact import Artifact
from quantkit.errors import OutputError
from quantkit.sweep.compare import compare
from quantkit.system.files import replace_text

pytestmark = pytest.mark.usefixtures("here")


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


@pytest.mark.parametrize(
    ("target", "flags"), [("artifact", []), ("artifact", ["--force"]), ("nowhere", ["--force"]), ("link", [])]
)
def test_an_output_that_is_a_link_is_told_before_the_work(
    target: str, flags: list[str], tiny: Path, artifact_of: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(artifact_of("rtn").folder, "artifact")
    Path("link").symlink_to(target)
    before = contents(Path("artifact"))
    refused(tiny, "link", *flags, says="the output link is a link", monkeypatch=monkeypatch)
    assert contents(Path("artifact")) == before


def test_a_place_that_is_no_folder_is_told_before_the_work(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("text")
    Path("dangling").symlink_to("nowhere")
    Path("circle").symlink_to("circle")
    for out in ("file/out", "file/a/b/out", "dangling/out", "dangling/a/out", "circle/out"):
        says = f"{out.partition('/')[0]} is no folder" if "circle" not in out else "circle/out"
        refused(tiny, out, "--force", says=says, monkeypatch=monkeypatch)
    for out in (".", "..", "", "/", "a/.."):
        refused(tiny, out, says="has no name of its own", monkeypatch=monkeypatch)
    for length in (250, 300):
        refused(tiny, "x" * length, says="name too long", monkeypatch=monkeypatch)


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
    shutil.rmtree("out.replaced")
    Path("out.replaced").symlink_to("other")
    for flags in ([], ["--force"]):
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
def test_an_output_in_the_source_is_refused(
    out: str, says: str, artifact_of: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the source is an artifact itself, which --force would replace by its own copy."""
    shutil.copytree(artifact_of("float", "bfloat16").folder, "source")
    Path("alias").symlink_to("source")
    before = contents(Path("source"))
    refused(Path("source"), out, "--force", says=says, monkeypatch=monkeypatch)
    with pytest.raises(OutputError, match="the source"):
        compare("source", ["rtn"], out="source/compared", evaluation={"text": str(SAMPLE)})
    assert contents(Path("source")) == before


def test_an_output_that_holds_the_source_is_refused(gguf: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(gguf.folder, "all")
    file = next(Path("all").glob("*.gguf"))
    refused(file, "all", "--force", says="the output all holds the source", monkeypatch=monkeypatch)
    ended = quantkit("import", file, "--out", "all", "--force")
    assert ended.code == 1
    assert "the output all holds the source" in ended.err
    verify("all")
    shutil.copy(file, "model.gguf")  # an output beside it is fine
    assert quantkit("convert", "model.gguf", "--method", "gguf", "--bits", "Q8_0", "--out", "out").code == 0


# The disk


def test_a_place_where_nothing_can_be_written_is_no_small_disk(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tiny, "/proc/out", says="nothing can be written in /proc", monkeypatch=monkeypatch)
    refused(tiny, "out", "--json", "/proc/made.json", says="written in /proc", monkeypatch=monkeypatch)


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may write everywhere")
def test_a_folder_that_may_not_be_written_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("locked").mkdir(mode=0o555)
    refused(tiny, "locked/out", says="nothing can be written in", monkeypatch=monkeypatch)


def test_a_text_is_replaced_without_following_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "a.json.new").symlink_to(tmp_path / "target")
    replace_text(tmp_path / "a.json", "new")
    assert (tmp_path / "target").read_text() == "kept"
    assert (tmp_path / "a.json").read_text() == "new"
    assert not (tmp_path / "a.json").is_symlink()
