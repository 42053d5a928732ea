"""Verify a finished artifact."""

from __future__ import annotations

from pathlib import Path

from quantkit.artifact import Artifact, open_artifact
from quantkit.contracts.registry import find_format
from quantkit.conversion.prove import read_all
from quantkit.errors import RecipeError
from quantkit.progress import Progress


def verify(path: str | Path | Artifact, progress: Progress | None = None) -> Artifact:
    """Recompute every hash of an artifact, read its tensors back, and hold its manifest against them.

    Raises ArtifactError.
    """
    artifact = path if isinstance(path, Artifact) else open_artifact(path)
    artifact.refuse_changed_files()
    read_all(artifact, progress or Progress())
    return artifact


def needs_torch(artifact: Artifact) -> bool:
    """Whether verifying the artifact takes torch."""
    try:
        return find_format(artifact.manifest.format).refuse_tensors is None
    except RecipeError:
        return True
