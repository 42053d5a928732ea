"""A size instead of a name: the type of each tensor chosen by what it costs and what it harms.

The harm of each type in each tensor is estimated once from a few calibration sequences (sensitivity.py) and kept in
the user's cache; an integer programme then shares out the bytes (numerics/allocation.py).
"""

from __future__ import annotations

import torch

from quantkit.calibration import sensitivity
from quantkit.calibration.sensitivity import kept_sensitivities
from quantkit.contracts.method import Job
from quantkit.contracts.run import Run
from quantkit.errors import RecipeError
from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.imatrix import without_silent_runs
from quantkit.formats.gguf.plan import Plan
from quantkit.methods.gguf.target import Target, candidates, free_tensors
from quantkit.numerics.allocation import fewest_bytes, least_damage
from quantkit.system.sizes import bits_per_weight

INPUTS = "embedding_length_per_layer_input"
VERSION = 1  # of what types make of weights; another one makes kept scores worthless


def choose(job: Job, run: Run, plan: Plan, target: Target) -> dict[str, str]:
    """The type of each tensor by its name in the file; tells what was chosen and the divergence that is estimated."""
    free, rest = free_tensors(plan)
    kinds = [candidates(plan, tensor) for tensor in free]
    of_parts = {part: row for tensor, row in zip(free, kinds, strict=True) for part in tensor.parts}
    scores = kept_sensitivities(job, run, of_parts, _changed, f"ggml {VERSION}")
    nbytes = [[tensor.padded(kind) for kind in row] for tensor, row in zip(free, kinds, strict=True)]
    damage = [
        [sum(scores[part][kind] for part in tensor.parts) for kind in row]
        for tensor, row in zip(free, kinds, strict=True)
    ]
    try:
        if target.nbytes is not None:
            chosen = least_damage(nbytes, damage, target.nbytes - rest)
        else:
            chosen = fewest_bytes(nbytes, damage, float(target.divergence or 0.0))
    except ValueError as error:
        raise RecipeError(f"{job.source.model}: {error}. Ask for more.") from None
    types = {tensor.name: row[k] for tensor, row, k in zip(free, kinds, chosen, strict=True)}
    types = dict(sorted(types.items(), key=lambda item: len(item[0])))  # a name that another is found in comes last
    harm = sum(row[k] for row, k in zip(damage, chosen, strict=True))
    total = rest + sum(row[k] for row, k in zip(nbytes, chosen, strict=True))
    run.findings.note(
        f"types chosen by sensitivity: {bits_per_weight(total, job.source.parameters):.2f} bits per weight in tensors, "
        f"estimated divergence {harm:.4f} nats a token before error feedback"
    )
    return types


def work_bytes(job: Job, plan: Plan) -> int:
    """What the measurement puts into files while it runs."""
    shape = plan.shape
    inputs = shape.sizes.keys.get(INPUTS, 0)
    return sensitivity.work_bytes(job.recipe.calibration, shape.blocks, shape.hidden, shape.vocabulary, inputs)


def _changed(kind: str, weight: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """What ggml makes of a weight (N, K) float32."""
    weights = None if importance is None else without_silent_runs(importance.cpu().numpy())
    packed = ggml.quantize(kind, weight.cpu().contiguous().numpy(), weights)
    return torch.from_numpy(ggml.dequantize(kind, packed, weight.shape[1])).to(weight.device)
