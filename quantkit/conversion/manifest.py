"""The manifest of a fresh artifact, and the fingerprint of the work that makes it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from quantkit.artifact import (
    Manifest,
    SourceEntry,
    package_versions,
)
from quantkit.contracts.job import Job
from quantkit.contracts.method import Method
from quantkit.conversion.staging import list_files
from quantkit.recipe import ConvertRecipe


def fingerprint(job: Job) -> dict[str, Any]:
    """All that decides the bytes of a checked job's artifact, as JSON values: only work that agrees is gone on with."""
    found: dict[str, Any] = {
        "recipe": job.recipe.model_dump(mode="json"),
        "options": job.options.model_dump(mode="json") | job.resolved,
        "source": job.source.hashes,
        "versions": package_versions(),
        "code": _code_digest(),
    }
    if job.calibration_digest:
        import torch

        # The order of float sums decides bytes too.
        found["calibration"] = job.calibration_digest
        found["device"] = job.device
        found["threads"] = torch.get_num_threads()
        found["processor"] = torch.backends.cpu.get_cpu_capability()
    return found


def _code_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def portable(job: Job) -> ConvertRecipe:
    """The recipe without places on this machine: of a folder and of a text file only the name is kept."""
    calibration = job.recipe.calibration
    if calibration.text is not None:
        calibration = calibration.model_copy(update={"text": Path(calibration.text).name})
    return job.recipe.model_copy(update={"model": job.source.name, "calibration": calibration})


def _manifest(job: Job, method: Method) -> Manifest:
    files = list_files(job.folder)
    weights = tuple(name for name in files if any(Path(name).match(pattern) for pattern in method.weight_files))
    weight_bytes = sum(files[name].bytes for name in weights)
    return Manifest(
        recipe=portable(job),
        options=job.options.model_dump() | job.resolved,
        source=SourceEntry(
            model=job.source.name,
            revision=job.source.revision,
            architecture=job.source.architecture,
            parameters=job.source.parameters,
            config=job.source.config,
            hashes=job.source.hashes,
        ),
        versions=package_versions(),
        tensor_types=dict(sorted(job.tensor_types.items())),
        weight_files=weights,
        weight_bytes=weight_bytes,
        bits_per_weight=round(weight_bytes * 8 / job.source.parameters, 4),
        calibration_sha256=job.calibration_digest or None,
        notes=tuple(job.notes),
        files=files,
    )
