"""convert: recipe -> source -> check -> write into `OUT.partial` -> read back -> manifest -> rename.

A conversion that was killed or interrupted goes on where it was: see staging.py and core/spool.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quantkit.artifact import (
    MANIFEST,
    Artifact,
    open_artifact,
)
from quantkit.checkpoints.journal import restore
from quantkit.contracts.job import Job
from quantkit.contracts.method import Method
from quantkit.contracts.registry import find_method
from quantkit.conversion.check import check, prepare_job
from quantkit.conversion.manifest import _manifest, fingerprint
from quantkit.conversion.prove import check_values
from quantkit.conversion.staging import refuse_existing, staged
from quantkit.progress import Progress
from quantkit.recipe import CalibrationSpec, ConvertRecipe
from quantkit.report.card import add_card
from quantkit.system.files import replace_text


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
    A conversion that was killed or interrupted goes on from `OUT.partial` when it is prepare_job for again.
    The maths of calibrated methods runs on `device`; activations of more than `spill_gb` GB go to a file (default:
    0.05 on the processor, a quarter of its memory on another device).
    What is forecast to take more than `memory_gb` GB (default: what is free) is refused.
    """
    job = prepare_job(
        model_id, method, bits, calibration=calibration, revision=revision, seed=seed, device=device, spill_gb=spill_gb,
        **options,
    )  # fmt: skip
    return run(job, out, force=force, memory=None if memory_gb is None else int(memory_gb * 1e9), progress=progress)


def default_out(recipe: ConvertRecipe) -> Path:
    """`MODEL-METHOD-BITS` in the current folder, followed by the options that were given."""
    name = f"{Path(recipe.model).name or 'model'}-{recipe.label}"
    return Path(re.sub(r"[^\w.-]+", "-", name))


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
