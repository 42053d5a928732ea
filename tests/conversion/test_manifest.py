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

# By method: the format that its artifacts had, and options in the words of that time.
FORMER: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("gptq", {"asymmetric": False}),
    "rtn": ("gptq", {}),
    "awq": ("awq", {"clip": False, "grid_points": 10}),
    "nf4": ("bitsandbytes", {}),
    "gguf": ("gguf", {"quality": "llama.cpp"}),
    "ctranslate2": ("ctranslate2", {}),
}


@pytest.mark.parametrize("method", FORMER)
def test_a_manifest_of_the_former_version_opens_verifies_and_reads(
    method: str, artifact_of: Callable[..., Artifact], tmp_path: Path
) -> None:
    kind, options = FORMER[method]
    made = open_artifact(shutil.copytree(artifact_of(method).folder, tmp_path / "out"))
    before = dense_values(made)
    values = json.loads((made.folder / MANIFEST).read_text())
    assert (values["schema_version"], values.pop("format")) == (1, kind)
    del values["calibration"], values["recipe"]["format"]
    values["recipe"]["options"] = options
    (made.folder / MANIFEST).write_text(json.dumps(values, indent=2) + "\n")
    former = open_artifact(made.folder)
    assert (former.manifest.format, former.manifest.calibration) == (kind, None)
    assert former.manifest.recipe.options == options
    one, other = (each.manifest.model_dump(exclude={"calibration", "recipe"}) for each in (former, made))
    assert one == other
    assert verify(made.folder) == former
    after = dense_values(former)
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_the_digest_of_the_code_is_of_what_computes(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    package = Path(shutil.copytree(PACKAGE, tmp_path / "quantkit", ignore=ignored))
    before = code_digest(package)
    for name in ("formats/gguf/ggml/search.c", "numerics/grid.py", "__init__.py"):
        data = (package / name).read_bytes()
        (package / name).write_bytes(data + b"\n")
        assert code_digest(package) != before
        (package / name).write_bytes(data)
    for name in ("cli/app.py", "cli/newest.py", "data/sample_articles.txt"):
        (package / name).write_text("changed = 1\n")
    assert code_digest(package) == before
    (tmp_path / "cli").mkdir()  # a folder of this name above the package is another one
    package = package.rename(tmp_path / "cli" / "quantkit")
    assert code_digest(package) == before
    (package / "methods" / "newest.py").write_text("BITS = 1\n")
    assert code_digest(package) != before
