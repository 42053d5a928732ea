import json
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = {path.name: path for path in sorted((ROOT / "examples").glob("*.py"))}
pytestmark = pytest.mark.usefixtures("here", "no_hub")


def run(name, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES[name]), run_name="__main__")


def test_convert_and_judge(one_block, here, capsys):
    run("convert_and_judge.py", one_block, "--out", "copy")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rtn-4: ")
    assert [line.split(":")[0] for line in lines[1:]] == ["bfloat16", "rtn-4"]
    assert (here / "copy" / "quantkit.json").is_file()


@pytest.mark.slow
def test_compare_three(one_block, here, capsys):
    run("compare_three.py", one_block, "--out", "three", "--text", ROOT / "quantkit" / "data" / "sample_articles.txt")
    assert "perplexity" in capsys.readouterr().out
    table = json.loads((here / "three" / "table.json").read_text(encoding="utf-8"))
    labels = [report["model"]["label"] for report in table["reports"]]
    assert labels == ["bfloat16", "rtn-4", "rtn-8", "gptq-4 damp_percent=0.05"]
    assert {path.suffix for path in (here / "three").glob("*.*")} == {".md", ".csv", ".json", ".svg", ".png"}


def test_read_back(tiny, capsys):
    run("read_back.py", tiny)
    errors = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(errors) == 3
    assert all(0.01 < error < 0.3 for error in errors)


def test_every_example_is_run_here_and_tells_an_error_in_one_line():
    assert list(EXAMPLES) == ["compare_three.py", "convert_and_judge.py", "read_back.py"]
    for name in EXAMPLES:
        with pytest.raises(SystemExit, match=r"^error: .*$"):
            run(name, "./nowhere")


def test_python_of_the_readme_runs(one_block, capsys):
    parts = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    code = "\n".join(parts).replace('"demo"', repr(str(one_block)))
    assert str(one_block) in code
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert "±" in capsys.readouterr().out
