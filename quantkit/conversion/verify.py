"""Verify a finished artifact."""

from __future__ import annotations

from pathlib import Path

from quantkit.artifact import (
    Artifact,
    open_artifact,
)
from quantkit.contracts.registry import find_method
from quantkit.conversion.prove import check_values
from quantkit.progress import Progress


def verify(path: str | Path | Artifact, progress: Progress | None = None) -> Artifact:
    """Recompute every hash of an artifact and read its tensors back; raises ArtifactError."""
    artifact = path if isinstance(path, Artifact) else open_artifact(path)
    artifact.refuse_changed_files()
    check_values(artifact, None, find_method(artifact.manifest.recipe.method), progress or Progress())
    return artifact
