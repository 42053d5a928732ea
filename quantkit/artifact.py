"""The Artifact: a folder with the standard files that foreign tools load, and a manifest, `quantkit.json`.

The manifest holds the recipe, the source's hashes, package versions, and the sha256 of every file. It holds no time
and no place, so the same recipe gives the same bytes. Artifacts are written to `OUT.partial`, verified and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field

from quantkit.digest import sha256_of
from quantkit.errors import ArtifactError, OutputError, RecipeError
from quantkit.recipe import ConvertRecipe, Strict, parse

MANIFEST = "quantkit.json"
PACKAGES = (
    "quantkit",
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "gguf",
    "libggml-python",
    "bitsandbytes",
    "ctranslate2",
)


class FileEntry(Strict):
    """Size in bytes and hex sha256 of one file."""

    bytes: int
    sha256: str


class SourceEntry(Strict):
    """Which checkpoint the artifact was made from."""

    model: str
    revision: str | None
    architecture: str
    parameters: int
    config: dict[str, object]
    hashes: dict[str, str]


class WeightError(Strict):
    """Relative error ||W - W'|| / ||W|| over the tensors that changed."""

    mean: float
    worst: float
    worst_tensor: str


class Manifest(Strict):
    """The content of `quantkit.json`."""

    schema_version: Literal[1] = 1
    recipe: ConvertRecipe
    options: dict[str, object]
    source: SourceEntry
    versions: dict[str, str]
    tensor_types: dict[str, int] = Field(default_factory=dict, description="count of tensors by stored type")
    weight_files: tuple[str, ...]
    weight_bytes: int
    bits_per_weight: float
    weight_error: WeightError | None = None
    notes: tuple[str, ...] = ()
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Artifact:
    """A finished artifact: `folder` and its `manifest`."""

    folder: Path
    manifest: Manifest

    @property
    def label(self) -> str:
        """Method and bits, such as ``gptq-4``."""
        return self.manifest.recipe.label

    @property
    def digest(self) -> str:
        """sha256 of the manifest file, which covers every other file."""
        return sha256_of(self.folder / MANIFEST)

    def refuse_changed_files(self) -> None:
        """Compare every file with the manifest; raises ArtifactError at the first that differs."""
        for name, entry in self.manifest.files.items():
            path = self.folder / name
            if not path.is_file():
                raise ArtifactError(f"{self.folder} lacks the file {name}. Convert again with --force.")
            if path.stat().st_size != entry.bytes or sha256_of(path) != entry.sha256:
                raise ArtifactError(f"{path} is corrupted: it differs from the manifest. Convert again with --force.")


def open_artifact(path: str | Path) -> Artifact:
    """Open an artifact folder by its manifest (file hashes are checked by `verify`). Raises ArtifactError."""
    folder = Path(path).expanduser()
    manifest_path = folder / MANIFEST
    if not folder.is_dir():
        raise ArtifactError(f"the artifact {path} does not exist. Make one with: quantkit convert MODEL --out {path}")
    if not manifest_path.is_file():
        raise ArtifactError(f"{path} holds no {MANIFEST}, so it is not an artifact of quantkit")
    try:
        values = json.loads(manifest_path.read_text(encoding="utf-8"))
        manifest = parse(Manifest, values, str(manifest_path))
    except (ValueError, TypeError, RecipeError) as error:
        raise ArtifactError(f"{manifest_path} is corrupted ({str(error).splitlines()[0]}). Convert again.") from None
    for name in (*manifest.files, *manifest.weight_files):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ArtifactError(f"{manifest_path} names the file {name!r} outside its folder; refused")
    if not manifest.weight_files or not set(manifest.weight_files) <= set(manifest.files):
        raise ArtifactError(f"{manifest_path} is corrupted (its weight files have no hashes). Convert again.")
    return Artifact(folder, manifest)


def package_versions() -> dict[str, str]:
    """Versions of the installed packages that decide bytes."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def refuse_existing(out: Path, force: bool) -> None:
    """Raise OutputError where `out` exists and may not be replaced."""
    if out.exists() and not force:
        raise OutputError(f"the output {out} exists. Choose another --out, or give --force to replace it.")
    if out.exists() and not (out / MANIFEST).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise OutputError(f"--force replaces only artifacts of quantkit, and {out} is none. Choose another --out.")


def refuse_small_disk(out: Path, need: int) -> None:
    """Raise OutputError where the disk of `out` has fewer than `need` bytes free."""
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < need:
        raise OutputError(
            f"the disk of {place} is too small: {need / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free. "
            "Free some space or choose another --out."
        )


@contextmanager
def staged(out: Path, force: bool) -> Iterator[Path]:
    """Yield an empty `OUT.partial`; rename it to `out` when the block ends well, remove it otherwise."""
    partial = out.with_name(out.name + ".partial")
    owner = partial / ".owner"
    if partial.exists():
        pid = owner.read_text() if owner.is_file() else ""
        if pid.isdigit() and int(pid) != os.getpid() and psutil.pid_exists(int(pid)):
            raise OutputError(f"{partial} is being written by process {pid}. Wait for it, or choose another --out.")
        shutil.rmtree(partial)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    owner.write_text(str(os.getpid()))
    try:
        yield partial
        owner.unlink()
        refuse_existing(out, force)
        if out.exists():
            replaced = out.with_name(out.name + ".replaced")
            if (replaced / MANIFEST).is_file():  # left by a process that was killed between the renames
                shutil.rmtree(replaced)
            out.rename(replaced)
            partial.rename(out)
            shutil.rmtree(replaced)
        else:
            partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def list_files(folder: Path) -> dict[str, FileEntry]:
    """Size and hash of every file under `folder` but the manifest and the staging mark, by relative name."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (MANIFEST, ".owner")
    }
