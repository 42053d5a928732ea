"""A result takes the place of an earlier one, never that of a file that is somebody else's."""

import json
import os
from pathlib import Path

import pytest
from made_up_reports import report, sheet
from tiny_models import quantkit

from quantkit.artifact import MANIFEST, Artifact, Manifest
from quantkit.errors import OutputError
from quantkit.evaluation.cross_check import CrossCheck
from quantkit.report.table import Table
from quantkit.report.written import RESULTS, TABLE, is_result, refuse_other, refuse_other_table
from quantkit.serving.load_test import LoadReport

OTHERS = {"package.json": '{"name": "mine"}', "list.json": "[1, 2]", "notes.txt": "mine", "index.html": "<html></html>"}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table's JSON, which `report` and `table` read."""
    path = tmp_path / "measured.json"
    path.write_text(sheet(1, 2).to_json())
    return path


def test_no_command_replaces_a_file_of_somebody_else(tmp_path: Path, table: Path) -> None:
    for name, text in OTHERS.items():
        path = tmp_path / name
        path.write_text(text)
        for words in (("report", table, "--out", path), ("table", table, "--json", path), ("methods", "--json", path)):
            ended = quantkit(*words)
            assert ended.code == 1
            assert f"{path} is there, and quantkit wrote no such file" in ended.err
            assert ended.err.strip().endswith("Choose another name, or remove it.")
            assert path.read_text() == text


def test_every_command_replaces_its_own_results(tmp_path: Path, table: Path, tiny: Path, gguf: Artifact) -> None:
    [file] = gguf.folder.glob("*.gguf")
    results = [
        ("report", table, "--out"), ("table", table, "--json"), ("methods", "--json"), ("cache", "--json"),
        ("inspect", gguf.folder, "--json"), ("inspect", file, "--json"),
        ("convert", tiny, "--method", "rtn", "--out", tmp_path / "never", "--dry-run", "--json"),
    ]  # fmt: skip
    path = tmp_path / "result"
    path.touch()  # as mktemp makes it
    for words in results:
        assert quantkit(*words, path).code == 0, words
        assert is_result(path), words
    assert quantkit(*results[0], path).code == 0


def test_records_that_commands_write_are_known_by_their_fields(tmp_path: Path) -> None:
    for kind in (Manifest, LoadReport):
        assert any(keys <= kind.model_fields.keys() for keys in RESULTS)
    assert {"native", "reference"} <= CrossCheck.__dataclass_fields__.keys()
    one = report("a", None, 20.0, 1e6, {1: 30.0})
    for text in (one.model_dump_json(), Table((one,)).to_json()):
        (tmp_path / "one.json").write_text(text)
        assert is_result(tmp_path / "one.json")


def test_the_manifest_of_an_artifact_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    path.write_text(json.dumps({"schema_version": 1, "recipe": {}, "weight_files": []}))
    assert is_result(path.rename(tmp_path / "copy.json"))
    (tmp_path / "copy.json").rename(path)
    with pytest.raises(OutputError, match="quantkit wrote no such file"):
        refuse_other(path)


def test_a_pipe_takes_what_comes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refuse_other(tmp_path / "pipe")


def test_a_table_replaces_only_an_earlier_one(tmp_path: Path, table: Path) -> None:
    for name in TABLE:
        folder = tmp_path / f"with-{name}"
        folder.mkdir()
        (folder / name).write_text("{}")
        ended = quantkit("table", table, "--out", folder)
        assert ended.code == 1
        assert f"{folder / name} is there, and quantkit wrote no table in that folder" in ended.err
        assert [path.name for path in folder.iterdir()] == [name]
    for _ in range(2):
        assert quantkit("table", table, "--out", tmp_path / "folder").code == 0
    refuse_other_table(tmp_path / "folder")
