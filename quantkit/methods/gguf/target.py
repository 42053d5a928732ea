"""A size instead of a name: what the options ask for, which types a tensor may take, and the recipe of a choice."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.contracts.method import Job
from quantkit.contracts.run import Run
from quantkit.errors import RecipeError
from quantkit.formats.gguf.file_types import TENSOR_TYPES, stays_float, stays_half
from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.plan import Plan, PlannedTensor
from quantkit.methods._targets import given_target, write_recipe
from quantkit.system.sizes import parse_size

FLOAT_TYPES = ("F16", "BF16", "F32")
WIDEST = "Q8_0"  # of the types that are chosen from
# Chosen from beside the K-quants. The others take long to be tried, and lie between these.
CHOSEN_IQ = ("IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ4_XS")


@dataclass(frozen=True)
class Target:
    """What is asked for: at most `nbytes` of tensors, or at most `divergence` nats a token."""

    nbytes: int | None = None
    divergence: float | None = None


def target_of(job: Job, other_bytes: int) -> Target | None:
    """What the options ask for; `other_bytes` of the file are no tensors. Raises RecipeError for a contradiction."""
    options = job.options
    targets = ("target_size", "target_bpw", "target_kld")
    if given_target(job, targets, ("tensor_type", "token_embedding_type", "output_tensor_type"), "types") is None:
        return None
    if options.target_kld is not None:
        return Target(divergence=float(options.target_kld))
    if options.target_size is not None:
        return Target(nbytes=parse_size(options.target_size, "target_size") - other_bytes)
    return Target(nbytes=int(options.target_bpw * job.source.parameters / 8) - other_bytes)


def candidates(plan: Plan, tensor: PlannedTensor) -> tuple[str, ...]:
    """The types that a tensor of the file may take, those that fit its rows; none where it stays as it is.

    So does one whose sensitivity is not measured: matrices of single heads, and an indexer's.
    """
    if not plan.is_measured(tensor) or stays_float(tensor.name, len(tensor.shape)) or stays_half(tensor.name):
        return ()
    fitting = [kind for kind in TENSOR_TYPES if tensor.shape[-1] % ggml.block_type(kind).block == 0]
    if not plan.is_weighted(tensor):
        fitting = [kind for kind in fitting if kind not in ggml.IMPORTANCE_ONLY]
    if any(kind.endswith("_K") for kind in fitting):
        return tuple(kind for kind in fitting if kind.endswith("_K") or kind in (*CHOSEN_IQ, WIDEST))
    return tuple(kind for kind in fitting if kind not in FLOAT_TYPES)


def free_tensors(plan: Plan) -> tuple[list[PlannedTensor], int]:
    """The tensors whose type is to be chosen, and the bytes of all others."""
    free = [tensor for tensor in plan.tensors if candidates(plan, tensor)]
    return free, plan.tensor_bytes - sum(tensor.padded() for tensor in free)


def refuse_target(plan: Plan, target: Target) -> None:
    """Raise RecipeError where no choice of types is as small as that."""
    if target.nbytes is None:
        return
    free, rest = free_tensors(plan)
    least = rest + sum(min(tensor.padded(kind) for kind in candidates(plan, tensor)) for tensor in free)
    if least > target.nbytes:
        raise RecipeError(
            f"the smallest file has {least / 1e6:.1f} MB of tensors, and {max(target.nbytes, 0) / 1e6:.1f} MB are "
            "asked for. Ask for more."
        )


def write_types(job: Job, run: Run) -> None:
    """Put a recipe beside the file that gives these types again, with the weighting that the choice came with."""
    chosen = {"tensor_type": run.findings.options["tensor_type"]}
    write_recipe(job, run, chosen if job.options.rounding == "gptq" else {**chosen, "imatrix": True})
