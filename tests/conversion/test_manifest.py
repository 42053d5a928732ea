"""Which code decides the bytes of an artifact, and that a manifest names its format."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit import open_artifact
from quantkit.artifact import MANIFEST, Artifact
from quantkit.conversion.manifest import PACKAGE, code_digest
from quantkit.errors import ArtifactError


def test_a_manifest_without_a_format_is_told(artifact_of: Callable[..., Artifact], tmp_path: Path) -> None:
    made = open_artifact(shutil.copytree(artifact_of("rtn").folder, tmp_path / "out"))
    values = json.loads((made.folder / MANIFEST).read_text())
    (made.folder / MANIFEST).write_text(json.dumps({**values, "format": None}))
    with pytest.raises(ArtifactError, match="format"):
        open_artifact(made.folder)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of quantkit's code."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    return Path(shutil.copytree(PACKAGE, tmp_path / "quantkit", ignore=ignored))


def test_a_change_of_what_computes_changes_the_digest_of_the_code(package: Path) -> None:
    before = code_digest(package)
    for name in ("formats/gguf/ggml/search.c", "numerics/grid.py", "__init__.py"):
        path = package / name
        data = path.read_bytes()
        path.write_bytes(data + b"\n")
        assert code_digest(package) != before
        path.write_bytes(data)
        assert code_digest(package) == before
    (package / "methods" / "newest.py").write_text("BITS = 1\n")
    assert code_digest(package) != before


def test_the_command_line_and_the_place_do_not_change_the_digest_of_the_code(package: Path, tmp_path: Path) -> None:
    before = code_digest(package)
    (package / "cli" / "app.py").write_text("changed = 1\n")
    (package / "cli" / "newest.py").write_text("BITS = 1\n")
    (package / "data" / "sample_articles.txt").write_text("Another text.\n")
    assert code_digest(package) == before
    (tmp_path / "cli").mkdir()  # a folder of this name above the package is another one
    assert code_digest(package.rename(tmp_path / "cli" / "quantkit")) == before
