"""Manifests of former versions still open, and which code decides the bytes of an artifact."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trials import dense_values

from quantkit import open_artifact, verify
from quantkit.artifact import MANIFEST, Artifact
from quantkit.conversion.manifest import PACKAGE, code_digest
from quantkit.errors import ArtifactError

# By method: the format that its artifacts had, and options in the words of that time.
FORMER: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("gptq", {"asymmetric": False}),
    "rtn": ("gptq", {}),
    "awq": ("awq", {"clip": False, "grid_points": 10}),
    "nf4": ("bitsandbytes", {}),
    "gguf": ("gguf", {"quality": "llama.cpp"}),
    "ctranslate2": ("ctranslate2", {}),
}


def make_former(folder: Path, options: dict[str, Any]) -> None:
    """Write the manifest as the version before formats had names of their own wrote it."""
    values = json.loads((folder / MANIFEST).read_text())
    assert values["schema_version"] == 1
    for key in ("format", "calibration"):
        del values[key]
    del values["recipe"]["format"]
    values["recipe"]["options"] = options
    (folder / MANIFEST).write_text(json.dumps(values, indent=2) + "\n")


@pytest.mark.parametrize("method", FORMER)
def test_a_manifest_of_the_former_version_opens_verifies_and_reads(
    method: str, artifact_of: Callable[..., Artifact], tmp_path: Path
) -> None:
    kind, options = FORMER[method]
    made = open_artifact(shutil.copytree(artifact_of(method).folder, tmp_path / "out"))
    assert made.manifest.format == kind
    before = dense_values(made)
    make_former(made.folder, options)
    former = open_artifact(made.folder)
    assert former.manifest.format == kind
    assert former.manifest.calibration is None
    assert former.manifest.recipe.options == options
    assert former.manifest.model_dump(exclude={"calibration", "recipe"}) == made.manifest.model_dump(
        exclude={"calibration", "recipe"}
    )
    assert verify(made.folder) == former
    after = dense_values(former)
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_format_that_no_version_had_is_told(artifact_of: Callable[..., Artifact], tmp_path: Path) -> None:
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
