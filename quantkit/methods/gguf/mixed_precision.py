"""Choose each tensor's GGUF type for a target size or divergence.

The added divergence of each type in each tensor is estimated once from a few calibration sequences (sensitivity.py) and
cached; an integer program then allocates types to tensors (numerics/allocation.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.contracts.method import CheckedJob, Job
from quantkit.contracts.run import Run
from quantkit.errors import RecipeError
from quantkit.formats.gguf.file_types import TENSOR_TYPES, stays_float, stays_half
from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.imatrix import without_silent_runs
from quantkit.formats.gguf.plan import Plan, PlannedTensor
from quantkit.system.sizes import bits_per_weight

if TYPE_CHECKING:
    import torch

VERSION = 1  # of the estimate's rounding; a new version invalidates cached scores
INPUTS = "embedding_length_per_layer_input"
FLOAT_TYPES = ("F16", "BF16", "F32")
WIDEST = "Q8_0"  # widest type to choose from
# Candidates in addition to the K-quants. The other types take long to try, and are between these.
CHOSEN_IQ = ("IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ4_XS")


@dataclass(frozen=True)
class Target:
    """The target: at most `nbytes` bytes of tensors, or at most `divergence` nats per token."""

    nbytes: int | None = None
    divergence: float | None = None


def candidates(tensor: PlannedTensor) -> tuple[str, ...]:
    """Return the types that fit the tensor's rows; empty if its type is fixed.

    Fixed are tensors whose sensitivity is not measured: per-head matrices, and an indexer's.
    """
    if not tensor.is_measured or stays_float(tensor.name, len(tensor.shape)) or stays_half(tensor.name):
        return ()
    fitting = [kind for kind in TENSOR_TYPES if tensor.shape[-1] % ggml.block_type(kind).block == 0]
    if not tensor.is_weighted:
        fitting = [kind for kind in fitting if kind not in ggml.IMPORTANCE_ONLY]
    if any(kind.endswith("_K") for kind in fitting):
        return tuple(kind for kind in fitting if kind.endswith("_K") or kind in (*CHOSEN_IQ, WIDEST))
    return tuple(kind for kind in fitting if kind not in FLOAT_TYPES)


def free_tensors(plan: Plan) -> tuple[list[PlannedTensor], int]:
    """Return the tensors whose types are chosen, and the total bytes of all others."""
    free = [tensor for tensor in plan.tensors if candidates(tensor)]
    return free, plan.tensor_bytes - sum(tensor.padded() for tensor in free)


def refuse_target(plan: Plan, target: Target) -> None:
    """Raise RecipeError if even the smallest types exceed the target size."""
    free, rest = free_tensors(plan)
    least = rest + sum(min(tensor.padded(kind) for kind in candidates(tensor)) for tensor in free)
    if target.nbytes is not None and least > target.nbytes:
        raise RecipeError(
            f"the smallest file has {least / 1e6:.1f} MB of tensors, and the target is "
            f"{max(target.nbytes, 0) / 1e6:.1f} MB. Give a larger target."
        )


def choose(job: CheckedJob, run: Run, plan: Plan, target: Target) -> dict[str, str]:
    """Choose each tensor's type, by its name in the file; note the choice and its estimated divergence."""
    from quantkit.calibration.sensitivity import kept_sensitivities
    from quantkit.numerics.allocation import fewest_bytes, least_damage

    free, rest = free_tensors(plan)
    kinds = [candidates(tensor) for tensor in free]
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
        raise RecipeError(f"{job.source.model}: {error}. Give a larger target.") from None
    types = {tensor.name: row[k] for tensor, row, k in zip(free, kinds, chosen, strict=True)}
    types = dict(sorted(types.items(), key=lambda item: len(item[0])))  # a name that contains another comes last
    harm = sum(row[k] for row, k in zip(damage, chosen, strict=True))
    total = rest + sum(row[k] for row, k in zip(nbytes, chosen, strict=True))
    run.findings.note(
        f"types chosen by sensitivity: {bits_per_weight(total, job.source.parameters):.2f} bits per weight in tensors, "
        f"estimated divergence {harm:.4f} nats per token before error feedback"
    )
    return types


def work_bytes(job: Job, plan: Plan) -> int:
    """Return the size of the temporary files for measuring sensitivities, in bytes."""
    from quantkit.calibration import sensitivity

    shape, inputs = plan.shape, plan.shape.number(INPUTS)
    return sensitivity.work_bytes(job.recipe.calibration, shape.blocks, shape.hidden, shape.vocabulary, inputs)


def _changed(kind: str, weight: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Return a weight, float32 (N, K), after ggml's rounding to type `kind`."""
    import torch

    weights = None if importance is None else without_silent_runs(importance.cpu().numpy())
    packed = ggml.quantize(kind, weight.cpu().contiguous().numpy(), weights)
    return torch.from_numpy(ggml.dequantize(kind, packed, weight.shape[1])).to(weight.device)
