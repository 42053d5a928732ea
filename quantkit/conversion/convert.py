"""convert: recipe -> source -> check -> write into `OUT.partial` -> read back -> manifest -> rename.

A conversion that was killed or interrupted goes on where it was: see staging.py and core/spool.py.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.artifact import (
    MANIFEST,
    Artifact,
    Manifest,
    SourceEntry,
    open_artifact,
    package_versions,
)
from quantkit.checkpoints.journal import restore
from quantkit.contracts.registry import Job, Method, find_method
from quantkit.conversion.forecast import Forecast, fit_memory, measure
from quantkit.conversion.prove import check_values
from quantkit.conversion.staging import list_files, refuse_existing, refuse_small_disk, replace_text, staged
from quantkit.formats.source import Source, open_source
from quantkit.progress import Progress
from quantkit.recipe import CalibrationSpec, ConvertRecipe, parse
from quantkit.report.card import add_card
from quantkit.system.device import refuse_device

SPILL_GB = 0.02
SPILL_SHARE = 0.25  # of the device's memory, where that is not the processor's


def convert(
    model_id: str,
    method: str,
    bits: str | int | None = None,
    out: str | Path | None = None,
    *,
    calibration: CalibrationSpec | dict[str, Any] | None = None,
    revision: str | None = None,
    seed: int = 0,
    force: bool = False,
    device: str = "cpu",
    spill_gb: float | None = None,
    memory_gb: float | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Artifact:
    """Quantize `model_id` (a hub id, a checkpoint folder, or ``demo``) and return the finished artifact.

    `bits` is said as the method's users say it (4, ``int8``, ``Q4_K_M``); `options` are the method's own.
    Raises a QuantkitError, before any long work, for whatever can be known beforehand; nothing is left behind then.
    A conversion that was killed or interrupted goes on from `OUT.partial` when it is asked for again.
    The maths of calibrated methods runs on `device`; activations of more than `spill_gb` GB go to a file (default:
    0.05 on the processor, a quarter of its memory on another device).
    What is forecast to take more than `memory_gb` GB (default: what is free) is refused.
    """
    job = asked(
        model_id, method, bits, calibration=calibration, revision=revision, seed=seed, device=device, spill_gb=spill_gb,
        **options,
    )  # fmt: skip
    return run(job, out, force=force, memory=None if memory_gb is None else int(memory_gb * 1e9), progress=progress)


def asked(
    model_id: str,
    method: str,
    bits: str | int | None = None,
    *,
    calibration: CalibrationSpec | dict[str, Any] | None = None,
    revision: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    spill_gb: float | None = None,
    **options: Any,
) -> Job:
    """The prepared job of such a conversion; see `convert`."""
    recipe = ConvertRecipe(
        model=str(model_id),
        revision=revision,
        method=method,
        bits=None if bits is None else str(bits),
        options=options,
        calibration=calibration
        if isinstance(calibration, CalibrationSpec)
        else parse(CalibrationSpec, calibration or {}, "calibration"),
        seed=seed,
    )
    job = prepare(recipe)
    refuse_device(device)
    job.device = device
    job.spill_bytes = int((default_spill_gb(device) if spill_gb is None else spill_gb) * 1e9)
    return job


def default_spill_gb(device: str) -> float:
    """GB of activations that are kept out of files where the user does not say: a file costs next to nothing."""
    if not device.startswith("cuda"):
        return SPILL_GB
    import torch

    return SPILL_SHARE * float(torch.cuda.get_device_properties(device).total_memory) / 1e9


def prepare(recipe: ConvertRecipe, source: Source | None = None) -> Job:
    """Everything that can be refused without reading weights: method, bits, options, checkpoint."""
    method = find_method(recipe.method)
    recipe = recipe.model_copy(update={"bits": method.parse_bits(recipe.bits)})
    options = method.parse_options(recipe.options)
    source = source or open_source(recipe.model, recipe.revision)
    return Job(source=source, recipe=recipe, options=options)


def default_out(recipe: ConvertRecipe) -> Path:
    """`MODEL-METHOD-BITS` in the current folder, followed by the options that were given."""
    name = f"{Path(recipe.model).name or 'model'}-{recipe.label}"
    return Path(re.sub(r"[^\w.-]+", "-", name))


def check(job: Job, out: Path, memory: int | None = None) -> Forecast | None:
    """Refuse, before long work, what the method, the calibration text, the disk or the memory cannot take.

    `memory` is the most bytes that the process may take (default: what is free). Returns the forecast, if there is one.
    """
    method = find_method(job.recipe.method)
    # At the end of a checkpoint its spool and its shards lie side by side.
    job.disk_bytes = method.check(job) * (2 if method.weight_files == ("*.safetensors",) else 1)
    refuse_small_disk(out, job.disk_bytes)
    if method.calibrated(job.options):
        from quantkit.calibration.walk import draw

        job.calibration_digest = hashlib.sha256(draw(job)[0].tobytes()).hexdigest()
    found = fit_memory(job, memory) if job.device == "cpu" else None
    if found is not None and found.spilled:
        job.disk_bytes += found.spilled
        refuse_small_disk(out, job.disk_bytes)
    return found


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


@dataclass(frozen=True)
class DryRun:
    """What a conversion would take: a forecast where the method has one, disk bytes, and seconds of the work."""

    forecast: Forecast | None
    disk: int
    out: Path
    before_seconds: float
    work_seconds: float

    def to_values(self) -> dict[str, object]:
        """Plain values for JSON: bytes and seconds."""
        memory = None if self.forecast is None else self.forecast.memory
        phases = {} if self.forecast is None else self.forecast.phases
        return {
            "memory_bytes": memory,
            "phases_bytes": phases,
            "disk_bytes": self.disk,
            "before_seconds": self.before_seconds,
            "work_seconds": self.work_seconds,
        }


def dry_run(job: Job, out: str | Path | None = None, *, force: bool = False, memory: int | None = None) -> DryRun:
    """Check a prepared job and forecast it; the first decoder block is really worked on, in a temporary folder."""
    out = Path(out) if out is not None else default_out(job.recipe)
    refuse_existing(out, force)
    found = check(job, out, memory)
    before, work = measure(job)
    return DryRun(found, job.disk_bytes, out, before, work)


def run(
    job: Job,
    out: str | Path | None = None,
    *,
    force: bool = False,
    memory: int | None = None,
    progress: Progress | None = None,
) -> Artifact:
    """Carry out a prepared job; see `convert`."""
    method = find_method(job.recipe.method)
    out = Path(out) if out is not None else default_out(job.recipe)
    job.progress = progress or Progress()
    refuse_existing(out, force)
    check(job, out, memory)
    with staged(out, force, fingerprint(job), job.progress.say) as folder:
        if not (folder / MANIFEST).is_file():
            job.folder = folder
            _make(job, method)
    return open_artifact(out)


def _make(job: Job, method: Method) -> None:
    """Write the artifact into the job's folder, prove it, and write the manifest last."""
    if not restore(job.folder, job):
        with job.progress.step("reading the source", job.source.parameters) as advance:
            job.source.refuse_non_finite(lambda name, _: advance(job.source.tensors[name].parameters))
    job.source.copy_side_files(job.folder)  # first, so that a method may mend one of them
    method.write(job)
    manifest = _manifest(job, method)
    error = check_values(Artifact(job.folder, manifest), job.source, method, job.progress)
    manifest = add_card(job.folder, manifest.model_copy(update={"weight_error": error}), job.source)
    replace_text(job.folder / MANIFEST, manifest.to_text())


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


def verify(path: str | Path | Artifact, progress: Progress | None = None) -> Artifact:
    """Recompute every hash of an artifact and read its tensors back; raises ArtifactError."""
    artifact = path if isinstance(path, Artifact) else open_artifact(path)
    artifact.refuse_changed_files()
    check_values(artifact, None, find_method(artifact.manifest.recipe.method), progress or Progress())
    return artifact
