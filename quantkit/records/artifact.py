"""Artifacts: folders with standard files that other tools load, and a manifest, `quantkit.json`.

The manifest records the recipe, source hashes, package versions and every file's sha256. It has no time stamps or
paths, so the same recipe gives the same bytes. Artifacts are written to `OUT.partial`, verified, then renamed.
"""

from __future__ import annotations

import hashlib
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field

from quantkit.errors import DISTRIBUTION, ArtifactError, RecipeError
from quantkit.records.recipe import MOST_ADAPTERS, ConvertRecipe, Strict, WithSeldom, parse
from quantkit.system.files import sha256_of
from quantkit.system.untrusted import LARGEST_NAME, inside, path_of, read_object, shown

MANIFEST = "quantkit.json"
CARD = "README.md"
# Files that engines may load although they are not in the manifest.
LOADABLE = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".py", ".json", ".jinja", ".model")
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


MOST_MANIFEST = 1 << 24  # bytes; one that names a type for each of 10,000 tensors has some 500 kB
MOST_FILES = 10_000
MOST_KEPT = 100_000  # tensors
MOST_NOTES, LONGEST_NOTE = 1_000, 10_000
MOST_PASSAGES = 1 << 13  # characters: 1,024 hashes of 6 bytes in base64
AGAIN = "Convert again."

Count = Annotated[int, Field(ge=0, le=1 << 60)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Note = Annotated[str, Field(max_length=LONGEST_NOTE)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class FileEntry(Strict):
    """Size in bytes and hex sha256 of a file."""

    bytes: Count
    sha256: Sha256


class AdapterEntry(Strict):
    """A LoRA adapter that was merged into the source: name, kind, and sha256 of its files."""

    name: str
    kind: Literal["LoRA", "rsLoRA", "DoRA"]
    hashes: Annotated[dict[str, Sha256], Field(max_length=2)]


class SourceEntry(WithSeldom):
    """The source checkpoint of an artifact, with the adapters that were merged into it, in order.

    For a multimodal model, `config` is the language model's; `kept` names the copied tensors outside it.
    """

    model: str
    revision: str | None
    architecture: str
    parameters: Annotated[Count, Field(ge=1)]
    config: dict[str, object]
    hashes: Annotated[dict[str, str], Field(max_length=MOST_FILES)]
    adapters: Annotated[tuple[AdapterEntry, ...], Field(max_length=MOST_ADAPTERS)] = ()
    kept: Annotated[tuple[str, ...], Field(max_length=MOST_KEPT)] = ()

    @property
    def name(self) -> str:
        """Return the name of the model, with the names of merged adapters."""
        return " + ".join([self.model, *(adapter.name for adapter in self.adapters)])


class WeightError(Strict):
    """Relative weight error ||W - W'|| / ||W|| over the tensors that changed."""

    mean: Share
    worst: Share
    worst_tensor: str


class CalibrationEntry(WithSeldom):
    """The calibration text: `sequences` of `length` tokens, out of `requested`.

    `passages`: fingerprint of the sequences (`data/passages.py`), to detect evaluation texts that overlap them.
    """

    text: str
    sha256: str
    sequences: Count
    length: Count
    requested: Count
    passages: Annotated[str, Field(pattern=r"^([A-Za-z0-9+/]{8})*$", max_length=MOST_PASSAGES)] = ""

    @property
    def sentence(self) -> str:
        """Describe the calibration in a sentence."""
        fewer = f" (requested: {self.requested}; the text is too short)" if self.sequences < self.requested else ""
        return (
            f"calibrated on {self.sequences} sequences of {self.length} tokens{fewer} of {self.text}, "
            f"sha256 {self.sha256[:12]}"
        )


class Manifest(WithSeldom):
    """The content of `quantkit.json`; `device` is the device that computed the weights, None for the CPU."""

    schema_version: Literal[1] = 1
    recipe: ConvertRecipe
    format: str
    options: dict[str, object]
    source: SourceEntry
    versions: dict[str, str]
    tensor_types: dict[str, Count] = Field(default_factory=dict, description="count of tensors by stored type")
    weight_files: tuple[str, ...]
    weight_bytes: Count
    bits_per_weight: Share
    weight_error: WeightError | None = None
    calibration_sha256: str | None = None
    calibration: CalibrationEntry | None = None
    device: str | None = None
    notes: Annotated[tuple[Note, ...], Field(max_length=MOST_NOTES)] = ()
    files: Annotated[dict[str, FileEntry], Field(max_length=MOST_FILES)]

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Return all notes, including the description of the calibration."""
        return (*self.notes, *([self.calibration.sentence] if self.calibration else []))

    def to_text(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


@dataclass(frozen=True)
class Artifact:
    """A finished artifact: its `folder` and `manifest`."""

    folder: Path
    manifest: Manifest

    @property
    def label(self) -> str:
        """Return method and bits, such as ``gptq-4``."""
        return self.manifest.recipe.label

    @property
    def digest(self) -> str:
        """Return the sha256 of the manifest without the model card's entry; it identifies all files but the card."""
        text = self.manifest.model_dump_json(exclude={"files": {CARD}})
        return hashlib.sha256(text.encode()).hexdigest()

    def added_files(self) -> list[str]:
        """Return the names of files in the folder that the manifest does not list."""
        names = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        return sorted(name for name in names if name != MANIFEST and name not in self.manifest.files)

    def refuse_changed_files(self) -> None:
        """Check every file against the manifest; raise ArtifactError at the first difference.

        Unlisted files that an engine may load are also refused; `added_files` lists the others.
        """
        for name in self.added_files():
            if name.endswith(LOADABLE) and not name.startswith("."):
                raise ArtifactError(
                    f"{self.folder / name} was added after the conversion, and engines may load it. Move it elsewhere."
                )
        for name, entry in self.manifest.files.items():
            path = self.folder / name
            if not path.is_file():
                raise ArtifactError(f"{self.folder} lacks the file {name}. Convert again with --force.")
            _refuse_link(self.folder, path)
            if path.stat().st_size != entry.bytes or sha256_of(path) != entry.sha256:
                raise ArtifactError(f"{path} is corrupted: it differs from the manifest. Convert again with --force.")


def open_artifact(path: str | Path) -> Artifact:
    """Read an artifact folder's manifest; file hashes are checked by `verify`. Raises ArtifactError."""
    folder = path_of(path, ArtifactError)
    manifest_path = folder / MANIFEST
    if not folder.is_dir():
        raise ArtifactError(f"the artifact {path} does not exist. Make one with: quantkit convert MODEL --out {path}")
    if not manifest_path.is_file():
        raise ArtifactError(f"{path} has no {MANIFEST}, so it is not an artifact of quantkit")
    _settle(folder)
    return Artifact(folder, _read_manifest(manifest_path))


def _read_manifest(path: Path) -> Manifest:
    """Read and validate a manifest file; raise ArtifactError."""
    _refuse_link(path.parent, path)
    values = read_object(path, ArtifactError, AGAIN, MOST_MANIFEST)
    try:
        manifest = parse(Manifest, values, str(path))
    except RecipeError as error:
        raise ArtifactError(f"{path} is corrupted ({str(error).rstrip('.')}). {AGAIN}") from None
    for name in (*manifest.files, *manifest.weight_files):
        if not _is_own(name):
            raise ArtifactError(f"{path} names the file {shown(name)} outside its folder. {AGAIN}")
        _refuse_link(path.parent, path.parent / name)
    if not manifest.weight_files or not set(manifest.weight_files) <= set(manifest.files):
        raise ArtifactError(f"{path} is corrupted (its weight files have no hashes). {AGAIN}")
    return manifest


def _is_own(name: str) -> bool:
    """Return whether this is a canonical name of a file inside the folder."""
    plain = PurePosixPath(name)
    usable = 0 < len(name) <= LARGEST_NAME and name.isprintable() and "\\" not in name
    return usable and not plain.is_absolute() and ".." not in plain.parts and str(plain) == name != "."


def _refuse_link(folder: Path, path: Path) -> None:
    if not inside(folder, path):
        raise ArtifactError(f"{path} is a link out of the artifact's folder. Put the file itself there. {AGAIN}")


def _settle(folder: Path) -> None:
    """Complete a manifest replacement that was interrupted after the model card was replaced."""
    new, card = folder / f"{MANIFEST}.new", folder / CARD
    if new.is_symlink() or not new.is_file() or not card.is_file():
        return
    try:
        entry = _read_manifest(new).files.get(CARD)
        if entry is not None and entry.sha256 == sha256_of(card):
            new.replace(folder / MANIFEST)
    except (OSError, ArtifactError):
        return


def package_versions() -> dict[str, str]:
    """Return the versions of installed packages that affect an artifact's bytes."""
    return dict(_installed(tuple(sys.path)))


@cache
def _installed(_places: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    versions: list[tuple[str, str]] = []
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions.append((package, version(DISTRIBUTION if package == "quantkit" else package)))
    return tuple(versions)
