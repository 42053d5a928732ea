"""The examples and the README's Python run on a tiny model, on the bundled text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# A port where nothing listens: the hub is out of reach, so the bundled sample serves.
ENVIRONMENT = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    assert [path.name for path in EXAMPLES] == ["compare_three.py", "convert_and_judge.py", "read_back.py"]


def test_convert_and_judge(tiny_llama: Path, tmp_path: Path) -> None:
    said = run(tmp_path, str(ROOT / "examples" / "convert_and_judge.py"), str(tiny_llama), "--out", "copy")
    lines = said.splitlines()
    assert lines[0].startswith("rtn-4: ")
    assert [line.split(":")[0] for line in lines[1:]] == ["bfloat16", "rtn-4"]
    assert (tmp_path / "copy" / "quantkit.json").is_file()


def test_compare_three(tiny_llama: Path, tmp_path: Path) -> None:
    text = ROOT / "quantkit" / "data" / "sample_articles.txt"
    script = str(ROOT / "examples" / "compare_three.py")
    said = run(tmp_path, script, str(tiny_llama), "--out", "three", "--text", str(text))
    assert "perplexity" in said
    table = json.loads((tmp_path / "three" / "table.json").read_text(encoding="utf-8"))
    labels = [report["model"]["label"] for report in table["reports"]]
    assert labels == ["bfloat16", "rtn-4", "rtn-8", "gptq-4 damp_percent=0.05"]
    assert {path.suffix for path in (tmp_path / "three").glob("*.*")} == {".md", ".csv", ".json", ".svg", ".png"}


def test_read_back(tiny_llama: Path, tmp_path: Path) -> None:
    said = run(tmp_path, str(ROOT / "examples" / "read_back.py"), str(tiny_llama))
    errors = [float(line.rpartition(" ")[2]) for line in said.splitlines()]
    assert len(errors) == 3
    assert all(0.01 < error < 0.3 for error in errors)


def test_an_example_tells_an_error_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "read_back.py"), "./nowhere"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("page", ["README.md"])
def test_python_of_the_pages_runs(page: str, tiny_llama: Path, tmp_path: Path) -> None:
    parts = (ROOT / page).read_text(encoding="utf-8").split("```python\n")[1:]
    code = "\n".join(part.partition("```")[0] for part in parts).replace('"demo"', repr(str(tiny_llama)))
    assert str(tiny_llama) in code
    said = run(tmp_path, "-c", code)
    assert "±" in said
