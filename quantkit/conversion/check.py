"""Everything that can be refused before long work."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from quantkit.contracts.job import Job
from quantkit.contracts.registry import find_method
from quantkit.conversion.forecast import Forecast, fit_memory
from quantkit.conversion.staging import refuse_small_disk
from quantkit.formats.source import Source, open_source
from quantkit.recipe import CalibrationSpec, ConvertRecipe, parse
from quantkit.system.device import refuse_device

SPILL_GB = 0.02


SPILL_SHARE = 0.25  # of the device's memory, where that is not the processor's


def prepare_job(
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
