import io
import re
import shlex
import shutil
from pathlib import Path

import pytest
from made_up_reports import report
from markdown_it import MarkdownIt
from rich.console import Console
from test_untrusted import BOMB
from tiny_models import changed_copy, fails, quantkit, succeeds

from quantkit import convert, verify
from quantkit.cli.progress import progress_bars
from quantkit.errors import SourceError
from quantkit.records.artifact import CARD
from quantkit.records.report import ModelEntry
from quantkit.report.card import END, front_matter, inherited_metadata
from quantkit.report.table import Table, escape_markdown
from quantkit.serving.servers import plan_server
from quantkit.system.files import safe_name

NAME = "a|b <img src=x onerror=alert(1)> `c` [d](http:e) *f*\n# g\x1b[31m &lt; [" + "/h]"
HOSTILE = NAME.replace("/", "")  # as the name of a folder
pytestmark = pytest.mark.usefixtures("here")


def shown_text(markdown):
    """What a reader of Markdown shows, and the kinds of elements that it makes."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    inner = [child for token in tokens for child in token.children or ()]
    return "".join(child.content for child in inner), {token.type for token in (*tokens, *inner)}


@pytest.mark.parametrize("text", [NAME, "<!-- x -->", "![a](b)", "a\\|b\u2028c \\<b>", "x" * 10_000])
def test_a_text_of_others_is_text_in_markdown(text):
    line = escape_markdown(text)
    assert line.isprintable()
    assert len(line) < 5000
    content, kinds = shown_text(f"Word {line} word.")
    assert kinds == {"paragraph_open", "inline", "text", "paragraph_close"} | ({"text_special"} & kinds)
    cells, kinds = shown_text(f"| a | b |\n|---|---|\n| {line} | 1 |")
    assert not kinds & {"html_inline", "link_open", "image", "code_inline", "em_open"}
    if len(text) < 200:
        expected = " ".join(text.replace("\u2028", " ").replace("\x1b", "\\x1b").split())
        assert " ".join(content.split()) == f"Word {expected} word."
        assert expected in " ".join(cells.split())

    for text in ("gptq-4 group_size=32", "meta-llama/Llama-3.1", "19 tensors: Q4_K -> Q5_0", "1.0 ± 0.5 %"):
        assert escape_markdown(text) == text


def test_a_table_keeps_its_cells_whatever_names_hold():
    entry = ModelEntry(label=NAME, name="tiny", method="gptq", digest="d", notes=(f"the tensor {NAME} is odd",))
    source = report("x", None, 20.0, 2e6)
    table = Table((source, report("y", "gptq", 21.0, 1e6, engine=NAME, model=entry)))
    head, _, *rows = table.to_markdown().split("\n\n")[0].splitlines()
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in (head, *rows)} == {5}
    ours = "<details><summary>All notes</summary>", "</details>"
    _, kinds = shown_text("\n".join(line for line in table.to_markdown().splitlines() if line not in ours))
    assert not kinds & {"html_inline", "html_block", "link_open", "image", "code_inline", "em_open", "heading_open"}
    lines = [line for line in table.to_markdown().splitlines() if line.startswith("- ")]
    assert len(lines) == len(table.notes()) + len(table.notes(full=True))
    console = Console(file=io.StringIO(), width=2000, force_terminal=False)
    for transpose in (True, False):
        table.show(console, transpose=transpose, notes=transpose)
    text = console.file.getvalue()
    assert "\x1b" not in text
    assert "[/h]" in text


def test_progress_holds_no_markup_and_no_control_characters(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then draws as on a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "1000")
    name = f"{NAME}\x1b]0;title\x07"
    with progress_bars() as progress:
        with progress.step(f"judging {name}", 3) as advance:
            advance(remark=f"remark {name}")
        progress.say(f"done with {name}")
    err = capsys.readouterr().err
    assert not set(err) & set("\x07\u2028")
    assert "\x1b]0;" not in err
    for part in ("judging", "done with"):
        assert f"{part} a|b <img" in err
    assert err.count("[/h]") >= 2


def test_a_model_of_any_name_is_converted_and_its_card_holds(one_block):
    shutil.copytree(one_block, HOSTILE)
    ended = succeeds("convert", f"./{HOSTILE}", "--method", "rtn", "--out", "out")
    assert "\x1b" not in ended.out
    assert "[h]" in ended.out
    artifact = verify("out")
    text = (artifact.folder / CARD).read_text()
    assert front_matter(text)["base_model"] == HOSTILE
    _, kinds = shown_text(text.split("---\n", 2)[2].replace("<!-- measured:begin -->", "").replace(END, ""))
    assert not kinds & {"html_inline", "html_block", "link_open", "image", "em_open"}
    assert quantkit("inspect", "out").code == 0


def test_a_command_and_a_file_take_no_name_for_an_option(one_block):
    shutil.copytree(one_block, "--trust-remote-code")
    command = plan_server("./--trust-remote-code", "vllm").arguments
    assert command[command.index("--served-model-name") + 1] == "trust-remote-code"
    shutil.copytree(one_block, "$(touch made) ;x")
    line = quantkit("serve", "./$(touch made) ;x", "--engine", "sglang", "--print").out
    assert str(Path("$(touch made) ;x").resolve()) in shlex.split(line)
    words = ("serve", one_block, "--engine", "sglang", "--print", "--name=--trust-remote-code")
    fails(*words, says="begins with a dash")
    assert safe_name("--force") == "force"
    assert safe_name("- -") == "unnamed"
    assert safe_name("a b/c") == "a-b-c"
    long = [safe_name("ü" * 300 + end) for end in "ab"]
    assert long[0] != long[1]
    assert all(len(name.encode()) < 170 for name in long)


def test_no_card_of_a_source_says_what_a_card_cannot_hold_and_ten_megabytes_are_not_read(tmp_path):
    for text in (
        "x: !!python/object/apply:os.system ['true']\nlicense: mit",
        "license: [[mit]]\nlanguage: [[en], [de]]",
        'license: "\\uD800"\nlanguage: ["en\\uD800"]',
        'license: "a\\e[31mb"\nlanguage: "e\\0n"',
        f"license: {'x' * 1000}",
        f"{BOMB}\nlicense: *i",
        "license: mit\n---\n" + "word " * 2_000_000,
        "license: MIT\n" + "# comment\n" * 1_000_000,
    ):
        (tmp_path / CARD).write_text(f"---\n{text}\n---\n# Title\n", encoding="utf-8")
        assert inherited_metadata(tmp_path) == ({"license": "mit"} if "license: mit" in text else {}), text[:99]


def test_a_card_that_is_no_file_of_the_source_is_left_out(tmp_path):
    card, other = tmp_path / "source" / CARD, tmp_path / "other.md"
    card.parent.mkdir()
    other.write_text("---\nlicense: secret\n---\n")
    for target in (other, card, "/dev/zero"):
        card.symlink_to(target)
        assert inherited_metadata(card.parent) == {}
        card.unlink()


def test_what_no_manifest_can_hold_is_told_before_the_work(one_block, monkeypatch):
    """A configuration may say in JSON what no file in UTF-8 can."""
    changed_copy(one_block, Path("source"), remark=["\ud800"])
    rounded = []
    monkeypatch.setattr("quantkit.methods.rtn.round_layer", lambda *given: rounded.append(given))
    with pytest.raises(SourceError):
        convert("source", "rtn", out="out")
    assert rounded == []
    assert [path.name for path in Path.cwd().iterdir()] == ["source"]
