"""Make the manifest of a new artifact, and the fingerprint of a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.contracts.method import CheckedJob, Job
from quantkit.contracts.run import Run
from quantkit.conversion.staging import list_files
from quantkit.models.source import Source
from quantkit.records.artifact import Manifest, SourceEntry, package_versions
from quantkit.records.recipe import ConvertRecipe
from quantkit.system.device import CPU, device_label
from quantkit.system.files import sha256_of
from quantkit.system.interpreter import PACKAGE, code_digest
from quantkit.system.sizes import bits_per_weight


def fingerprint(job: CheckedJob) -> dict[str, Any]:
    """Return everything that decides the artifact's bytes, as JSON values; work with an equal one can be resumed."""
    values: dict[str, Any] = {
        "recipe": job.recipe.model_dump(mode="json"),
        "format": job.format.name,
        "options": job.options.model_dump(mode="json") | dict(job.checked.options),
        "source": job.source.hashes,
        "side_files": side_hashes(job.source),
        "versions": package_versions(),
        "code": code_digest(PACKAGE),
    }
    if job.calibration is not None:
        import torch

        # The order of float sums decides bytes too.
        values["calibration"] = job.calibration.digest
        values["device"] = job.device
        values["batch_tokens"] = job.batch_tokens
        values["threads"] = torch.get_num_threads()
        values["processor"] = torch.backends.cpu.get_cpu_capability()
        if job.shards.size > 1:
            values["processes"] = job.shards.size
    return values


def side_hashes(source: Source) -> dict[str, str]:
    """Return the sha256 of a checkpoint's tokenizer files and other side files by name; empty for a GGUF file."""
    return {name: sha256_of(path) for name, path in source.side_files().items()}


def portable(job: Job) -> ConvertRecipe:
    """Return the recipe without this machine's paths: of folders and text files only the names remain."""
    calibration = job.recipe.calibration
    if calibration.text is not None:
        calibration = calibration.model_copy(update={"text": Path(calibration.text).name})
    adapters = tuple(adapter.name for adapter in job.source.adapters)
    return job.recipe.model_copy(update={"model": job.source.name, "adapters": adapters, "calibration": calibration})


def make_manifest(job: CheckedJob, run: Run) -> Manifest:
    """Return the manifest for the run's folder, still without weight errors and the model card's hash."""
    files = list_files(run.folder)
    weights = tuple(name for name in files if any(Path(name).match(pattern) for pattern in job.format.weight_files))
    weight_bytes = sum(files[name].bytes for name in weights)
    return Manifest(
        recipe=portable(job),
        format=job.format.name,
        options=job.options.model_dump() | dict(job.checked.options) | run.findings.options,
        source=SourceEntry(
            model=job.source.name,
            revision=job.source.revision,
            architecture=job.source.architecture,
            parameters=job.source.parameters,
            config=job.source.config,
            hashes=job.source.hashes,
            adapters=tuple(adapter.entry for adapter in job.source.adapters),
            kept=tuple(sorted(job.source.passthrough)),
        ),
        versions=package_versions(),
        tensor_types=dict(sorted(run.findings.tensor_types.items())),
        weight_files=weights,
        weight_bytes=weight_bytes,
        bits_per_weight=round(bits_per_weight(weight_bytes, job.source.parameters), 4),
        calibration_sha256=None if job.calibration is None else job.calibration.digest,
        calibration=None if job.calibration is None else job.calibration.entry,
        device=None if job.device == CPU else device_label(job.device),
        notes=(*job.checked.notes, *run.findings.notes.values()),
        files=files,
    )
