"""Where an artifact cannot be written, that is told before the work; and nothing of anybody else's is changed."""

import shutil
from pathlib import Path

import pytest
from tiny_models import SAMPLE, fails, quantkit

from quantkit import convert, verify
from quantkit.comparison.compare import compare
from quantkit.errors import OutputError
from quantkit.system.files import replace_text

pytestmark = pytest.mark.usefixtures("here")


def tree(folder):
    """Every path below a folder, with what a link points to and what a file holds."""
    return {
        str(path): path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def refused(tiny, out, *flags, says, monkeypatch):
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


@pytest.mark.parametrize(("target", "flags"), [("artifact", ["--force"]), ("nowhere", ["--force"]), ("link", [])])
def test_an_output_that_is_a_link_is_told_before_the_work(target, flags, tiny, artifact_of, monkeypatch):
    shutil.copytree(artifact_of("rtn").folder, "artifact")
    Path("link").symlink_to(target)
    refused(tiny, "link", *flags, says="the output link is a symbolic link", monkeypatch=monkeypatch)


def test_a_place_that_is_no_folder_is_told_before_the_work(tiny, monkeypatch):
    Path("file").write_text("text")
    Path("dangling").symlink_to("nowhere")
    Path("circle").symlink_to("circle")
    nameless, long = "is not the name of a folder", "name too long"
    for out, says in {
        "file/a/b/out": "file is not a folder", "dangling/out": "dangling is not a folder", "circle/out": "circle/out",
        "..": nameless, "": nameless, "/": nameless, "a/..": nameless, "x" * 250: long, "x" * 300: long,
        "/proc/out": "nothing can be written in /proc",
    }.items():  # fmt: skip
        refused(tiny, out, "--force", says=says, monkeypatch=monkeypatch)
    refused(tiny, "out", "--json", "/proc/made.json", says="written in /proc", monkeypatch=monkeypatch)
    Path("disk").mkdir()
    Path("models").symlink_to("disk")  # a link above the output is followed
    convert(str(tiny), "rtn", out="models/new/out")
    verify("disk/new/out")
    Path("target").write_text("kept")
    Path("a.json.new").symlink_to("target")
    replace_text(Path("a.json"), "new")
    assert (Path("target").read_text(), Path("a.json").read_text()) == ("kept", "new")


def test_force_does_not_take_the_name_of_what_is_not_ours(tiny, monkeypatch):
    convert(str(tiny), "rtn", out="out")
    Path("out.replaced").mkdir()
    Path("out.replaced/thesis.txt").write_text("years of work")
    refused(tiny, "out", "--force", says="moves the old one to out.replaced", monkeypatch=monkeypatch)
    convert(str(tiny), "rtn", out="other")  # nobody needs the name there
    shutil.rmtree("out.replaced")
    Path("out.replaced").symlink_to("other")
    for flags in ([], ["--force"]):
        refused(tiny, "out", *flags, says="out.replaced is a symbolic link", monkeypatch=monkeypatch)
    verify("other")


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("source", "the output source is the source"),
        ("source/../source/a/b", "is inside the source"),
        ("alias/out", "is inside the source"),
    ],
)
def test_an_output_in_the_source_is_refused(out, says, artifact_of, monkeypatch):
    """Also where the source is an artifact itself, which --force would replace by its own copy."""
    shutil.copytree(artifact_of("float", "bfloat16").folder, "source")
    Path("alias").symlink_to("source")
    refused(Path("source"), out, "--force", says=says, monkeypatch=monkeypatch)
    with pytest.raises(OutputError, match="the source"):
        compare("source", ["rtn"], out="source/compared", evaluation={"text": str(SAMPLE)})


def test_an_output_that_holds_the_source_is_refused(gguf, monkeypatch):
    shutil.copytree(gguf.folder, "all")
    file = next(Path("all").glob("*.gguf"))
    refused(file, "all", "--force", says="the output all contains the source", monkeypatch=monkeypatch)
    fails("import", file, "--out", "all", "--force", says="the output all contains the source")
    shutil.copy(file, "model.gguf")  # an output beside it is fine
    assert quantkit("convert", "model.gguf", "--method", "gguf", "--bits", "Q8_0", "--out", "out").code == 0
