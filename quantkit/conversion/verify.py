"""Verify a finished artifact."""

from __future__ import annotations

from pathlib import Path

from quantkit.artifact import Artifact, open_artifact
from quantkit.conversion.prove import read_all
from quantkit.progress import Progress


def verify(path: str | Path | Artifact, progress: Progress | None = None) -> Artifact:
    """Recompute every hash of an artifact and read its tensors back; raises ArtifactError."""
    artifact = path if isinstance(path, Artifact) else open_artifact(path)
    artifact.refuse_changed_files()
    read_all(artifact, progress or Progress())
    return artifact
