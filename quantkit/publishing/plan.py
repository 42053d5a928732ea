"""What of an artifact goes to the hub: the files that its manifest names, verified, and no others of the folder.

The card goes as the hub shows it, the manifest with its hash, and scores of registered benchmarks where there are some.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from quantkit.artifact import CARD, MANIFEST, Artifact, FileEntry, open_artifact
from quantkit.conversion.verify import verify
from quantkit.errors import ArtifactError, RecipeError
from quantkit.progress import Progress
from quantkit.publishing.card import hub_card
from quantkit.publishing.results import eval_results
from quantkit.untrusted import shown

LONGEST_REPO = 96  # characters of a repository's name that the hub takes
PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
# Ends of names of what is being made, or belongs to a process: no part of an artifact, whatever a manifest says.
UNFINISHED = (".partial", ".incomplete", ".lock", ".new", ".tmp")


@dataclass(frozen=True)
class Upload:
    """One file: its `name` in the repository, its size in bytes and hex sha256, and its bytes or the file of them."""

    name: str
    nbytes: int
    sha256: str
    content: Path | bytes


@dataclass(frozen=True)
class Plan:
    """What goes to `repo`: the verified `artifact`, its files, and what is to be known of them."""

    repo: str
    artifact: Artifact
    uploads: tuple[Upload, ...]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(upload.nbytes for upload in self.uploads)


@dataclass(frozen=True)
class Asked:
    """What was asked for, with all that can be checked without reading the weights."""

    repo: str
    artifact: Artifact
    base_model: str | None
    scores: dict[str, bytes]
    notes: tuple[str, ...]


def plan(
    artifact: str | Path | Artifact,
    repo: str,
    *,
    base_model: str | None = None,
    results: Sequence[str | Path] = (),
    progress: Progress | None = None,
) -> Plan:
    """What `push` would send; asks neither the network nor for a token. Raises as `push` does."""
    return verified(check(artifact, repo, base_model, results), progress)


def check(artifact: str | Path | Artifact, repo: str, base_model: str | None, results: Sequence[str | Path]) -> Asked:
    """Everything that can be checked without reading the weights; raises as `push` does."""
    refuse_name(repo, "--repo")
    if base_model is not None:
        refuse_name(base_model, "--base-model")
    opened = artifact if isinstance(artifact, Artifact) else open_artifact(artifact)
    for name in opened.manifest.files:
        _refuse_stranger(opened, name)
    if CARD not in opened.manifest.files:
        raise ArtifactError(f"{opened.folder} has no {CARD}. Convert again with --force.")
    scores, notes = eval_results(results, opened)
    return Asked(repo, opened, base_model, scores, tuple(notes))


def refuse_name(repo: str, what: str) -> None:
    """Raise RecipeError for a name that is no ``user/name`` of the hub."""
    parts = repo.split("/")
    good = len(parts) == 2 and all(PART.fullmatch(part) for part in parts) and len(repo) <= LONGEST_REPO
    if not good or "--" in repo or ".." in repo or repo.endswith(".git"):
        raise RecipeError(
            f"{what} {shown(repo)} is no name on the hub: give user/name, of letters, digits, '-', '_' and '.'"
        )


def _refuse_stranger(artifact: Artifact, name: str) -> None:
    """Raise ArtifactError for a file that no artifact has: hidden, unfinished, or the manifest itself."""
    hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
    if hidden or name.lower().endswith(UNFINISHED) or name == MANIFEST:
        raise ArtifactError(
            f"{artifact.folder / MANIFEST} names {shown(name)}, which is no file of a model and is not pushed. "
            "Convert again with --force."
        )


def verified(asked: Asked, progress: Progress | None) -> Plan:
    """The plan with all files, read and found to be what the manifest says."""
    artifact = verify(asked.artifact, progress)
    text, notes = hub_card(artifact, asked.repo, asked.base_model)
    card = _upload(CARD, text.encode())
    files = {**artifact.manifest.files, CARD: FileEntry(bytes=card.nbytes, sha256=card.sha256)}
    manifest = artifact.manifest.model_copy(update={"files": files})
    uploads = [
        Upload(name, entry.bytes, entry.sha256, artifact.folder / name)
        for name, entry in artifact.manifest.files.items()
        if name != CARD
    ]
    texts = [card, _upload(MANIFEST, manifest.to_text().encode()), *(_upload(*one) for one in asked.scores.items())]
    return Plan(asked.repo, artifact, (*uploads, *texts), (*asked.notes, *notes))


def _upload(name: str, data: bytes) -> Upload:
    return Upload(name, len(data), hashlib.sha256(data).hexdigest(), data)
