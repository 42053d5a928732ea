"""A size instead of a name: the type of each tensor chosen by what it costs and what it harms.

The harm of each type in each tensor is estimated once from a few calibration sequences (sensitivity.py) and kept in
the user's cache; an integer programme then shares out the bytes (core/allocate.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from quantkit.core import ggml
from quantkit.demo import cache_folder
from quantkit.errors import RecipeError, SourceError
from quantkit.methods.gguf.importance import without_silent_runs
from quantkit.methods.gguf.mix import TENSOR_TYPES, stays_float
from quantkit.methods.gguf.plan import Plan, PlannedTensor, plan_of
from quantkit.methods.gguf.sizes import parse_size
from quantkit.registry import Job

if TYPE_CHECKING:
    import torch

    from quantkit.sensitivity import Changes, Scores

FLOAT_TYPES = ("F16", "BF16", "F32")
WIDEST = "Q8_0"  # of the types that are chosen from
VERSION = 2  # of the estimate; another one makes kept scores worthless


@dataclass(frozen=True)
class Target:
    """What is asked for: at most `nbytes` of tensors, or at most `divergence` nats a token."""

    nbytes: int | None = None
    divergence: float | None = None


def target_of(job: Job, other_bytes: int) -> Target | None:
    """What the options ask for; `other_bytes` of the file are no tensors. Raises RecipeError for a contradiction."""
    options = job.options
    given = [name for name in ("target_size", "target_bpw", "target_kld") if getattr(options, name) is not None]
    if len(given) > 1:
        raise RecipeError(f"{' and '.join(given)} contradict each other. Give one of them.")
    if job.bits == "auto" and not given and not options.tensor_type:
        raise RecipeError("bits auto needs --target-size, --target-bpw or --target-kld to choose types by.")
    if given and job.bits != "auto":
        raise RecipeError(f"{given[0]} chooses the types itself: it needs --bits auto, not {job.bits}.")
    if given and options.tensor_type:
        raise RecipeError(f"tensor_type and {given[0]} cannot both decide the types. Give one of them.")
    if not given:
        return None
    if options.target_kld is not None:
        return Target(divergence=float(options.target_kld))
    if options.target_size is not None:
        return Target(nbytes=parse_size(options.target_size, "target_size") - other_bytes)
    return Target(nbytes=int(options.target_bpw * job.source.parameters / 8))


def candidates(tensor: PlannedTensor) -> tuple[str, ...]:
    """The types that a tensor of the file may take, those that fit its rows; none where it stays as it is."""
    if not tensor.parts or stays_float(tensor.name, len(tensor.shape)):
        return ()
    fitting = [kind for kind in TENSOR_TYPES if tensor.shape[-1] % ggml.block_type(kind).block == 0]
    if any(kind.endswith("_K") for kind in fitting):
        fitting = [kind for kind in fitting if kind.endswith("_K") or kind == WIDEST]
    return tuple(kind for kind in fitting if kind not in FLOAT_TYPES)


def _free(plan: Plan) -> tuple[list[PlannedTensor], int]:
    """The tensors whose type is to be chosen, and the bytes of all others."""
    free = [tensor for tensor in plan.tensors if candidates(tensor)]
    return free, plan.tensor_bytes - sum(tensor.padded() for tensor in free)


def refuse_target(plan: Plan, target: Target) -> None:
    """Raise RecipeError where no choice of types is as small as that."""
    if target.nbytes is None:
        return
    free, rest = _free(plan)
    least = rest + sum(min(tensor.padded(kind) for kind in candidates(tensor)) for tensor in free)
    if least > target.nbytes:
        raise RecipeError(
            f"the smallest file has {least / 1e6:.1f} MB of tensors, and {max(target.nbytes, 0) / 1e6:.1f} MB are "
            "asked for. Ask for more."
        )


def choose(job: Job, target: Target) -> dict[str, str]:
    """The type of each tensor by its name in the file; tells what was chosen and the divergence that is estimated."""
    from quantkit.core.allocate import fewest_bytes, least_damage

    plan = plan_of(job)
    free, rest = _free(plan)
    scores = _scores(job, free)
    nbytes = [[tensor.padded(kind) for kind in candidates(tensor)] for tensor in free]
    damage = [[sum(scores[part][kind] for part in tensor.parts) for kind in candidates(tensor)] for tensor in free]
    try:
        if target.nbytes is not None:
            chosen = least_damage(nbytes, damage, target.nbytes - rest)
        else:
            chosen = fewest_bytes(nbytes, damage, float(target.divergence or 0.0))
    except ValueError as error:
        raise RecipeError(f"{job.source.model}: {error}. Ask for more.") from None
    types = {tensor.name: candidates(tensor)[k] for tensor, k in zip(free, chosen, strict=True)}
    harm = sum(row[k] for row, k in zip(damage, chosen, strict=True))
    total = rest + sum(row[k] for row, k in zip(nbytes, chosen, strict=True))
    job.tell(
        f"types chosen by sensitivity: {total * 8 / job.source.parameters:.2f} bits per weight, "
        f"estimated divergence {harm:.4f} nats a token before error feedback"
    )
    return types


def write_recipe(job: Job) -> None:
    """Put a recipe beside the file that gives these types again, without measuring and without places of this machine.

    It asks for the weighting that the choice came with.
    """
    options = {key: value for key, value in job.recipe.options.items() if not key.startswith("target_")}
    options |= {"tensor_type": job.resolved["tensor_type"]}
    if job.options.quality != "best":
        options["imatrix"] = True
    calibration = job.recipe.calibration
    text = Path(calibration.text).name if calibration.text is not None else None
    values = {
        "model": job.source.name,
        "method": job.recipe.method,
        "bits": job.bits,
        "options": options,
        "calibration": {**calibration.model_dump(), "text": text},
        "seed": job.recipe.seed,
    }
    (job.folder / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def _scores(job: Job, free: list[PlannedTensor]) -> Scores:
    """The estimates, from the user's cache where they are there."""
    from quantkit import sensitivity

    kinds = {part: candidates(tensor) for tensor in free for part in tensor.parts}
    path = _kept_at(job)
    kept = _read(path)
    if all(set(kinds[name]) <= set(kept.get(name, ())) for name in kinds):
        return kept

    def propose(name: str) -> Changes | None:
        return sensitivity.Changes(kinds[name], _changed) if name in kinds else None

    found = sensitivity.sensitivities(job, propose)
    if missing := [name for name in kinds if name not in found]:
        raise SourceError(f"{job.source.model}: no sensitivity was measured for {missing[0]}")
    if broken := [name for name, row in found.items() if not all(map(math.isfinite, row.values()))]:
        raise SourceError(f"{job.source.model}: the sensitivity of {broken[0]} is not finite; its values overflow.")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.replace(path)
    return found


def _read(path: Path) -> Scores:
    """Kept scores; none where there is no file or it cannot be read."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return {name: {kind: float(score) for kind, score in kinds.items()} for name, kinds in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def work_bytes(job: Job, plan: Plan) -> int:
    """What the measurement puts into files while it runs: what flows into each block."""
    from quantkit import sensitivity
    from quantkit.activations import DTYPE

    spec = job.recipe.calibration
    tokens = min(sensitivity.SEQUENCES, spec.sequences) * spec.length
    return (plan.shape.blocks + 1) * tokens * plan.shape.hidden * DTYPE.itemsize


def _changed(kind: str, weight: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """What ggml makes of a weight (N, K) float32."""
    import torch

    weights = None if importance is None else without_silent_runs(importance.cpu().numpy())
    packed = ggml.quantize(kind, weight.cpu().contiguous().numpy(), weights)
    return torch.from_numpy(ggml.dequantize(kind, packed, weight.shape[1])).to(weight.device)


def _kept_at(job: Job) -> Path:
    """Where the scores of this source and text are kept."""
    from quantkit import sensitivity

    digest = hashlib.sha256()
    for part in (VERSION, sensitivity.SEQUENCES, job.recipe.seed, sorted(job.source.hashes.items())):
        digest.update(f"{part}\n".encode())
    digest.update(job.calibration_digest.encode())
    return cache_folder() / "sensitivity" / f"{digest.hexdigest()[:32]}.json"
