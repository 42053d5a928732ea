"""The artifacts that lie beside their reports, as comparisons and sweeps leave them, and the command that makes one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from quantkit.artifact import MANIFEST, Artifact, open_artifact
from quantkit.errors import ArtifactError
from quantkit.recipe import CalibrationSpec, ConvertRecipe
from quantkit.report.sheet import labelled


def find_artifacts(places: Iterable[str]) -> tuple[dict[str, Artifact], list[str]]:
    """The artifacts in the folders of `places` by their digests, and remarks on those that cannot be read.

    Only manifests are read. A report belongs to an artifact by its digest, whatever both are called.
    """
    found: dict[str, Artifact] = {}
    remarks = []
    for place in places:
        path = labelled(place)[1]
        root = path if path.is_dir() else path.parent
        of_a_sweep = sorted(root.glob(f"models/*/artifacts/*/{MANIFEST}"))
        for manifest in (*sorted(root.glob(f"artifacts/*/{MANIFEST}")), *of_a_sweep):
            try:
                artifact = open_artifact(manifest.parent)
            except ArtifactError as error:
                remarks.append(str(error))
            else:
                found.setdefault(artifact.digest, artifact)
    return found, list(dict.fromkeys(remarks))


def convert_command(recipe: ConvertRecipe, folder: str) -> str:
    """The command line that makes an artifact of `recipe` in `folder`; what is a default is left out."""
    return shlex.join(["quantkit", "convert", operand(recipe.model), *_options(recipe), "--out", folder])


def operand(text: str) -> str:
    """`text` as an argument that is taken for no option."""
    return f"./{text}" if text.startswith("-") else text


def _options(recipe: ConvertRecipe) -> Iterator[str]:
    for name, value in (("method", recipe.method), ("bits", recipe.bits), ("format", recipe.format)):
        if value is not None:
            yield from _option(name, value)
    for name, value in sorted(recipe.options.items()):
        yield from _option(name, value)
    for adapter in recipe.adapters:
        yield from _option("adapter", adapter)
    for name, value in recipe.calibration:
        if value != getattr(CalibrationSpec(), name):
            yield from _option(f"calibration_{name}", value)
    if recipe.revision is not None:
        yield from _option("revision", recipe.revision)
    if recipe.seed:
        yield from _option("seed", recipe.seed)


def _option(name: str, value: object) -> Iterator[str]:
    flag = name.replace("_", "-")
    if value is None:
        return
    if isinstance(value, bool):
        yield f"--{flag}" if value else f"--no-{flag}"
        return
    written = json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)
    yield from (f"--{flag}", written)


def shell_words(command: str, *arguments: str) -> str:
    """A command of quantkit as a shell takes it."""
    return shlex.join(["quantkit", command, *arguments])


def shown_folder(folder: Path) -> str:
    """A folder as a command takes it."""
    return operand(str(folder))
