"""A size instead of a name: the type of each tensor chosen by what it costs and what it harms.

The harm of each type in each tensor is estimated once from a few calibration sequences (sensitivity.py) and kept in
the user's cache; an integer programme then shares out the bytes (numerics/allocation.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import torch

from quantkit.calibration import sensitivity
from quantkit.calibration.activations import DTYPE
from quantkit.calibration.sensitivity import Changes, Scores
from quantkit.calibration.tokens import tokens_of
from quantkit.contracts.method import Job
from quantkit.contracts.run import Run
from quantkit.errors import RecipeError, SourceError
from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.imatrix import without_silent_runs
from quantkit.formats.gguf.plan import Plan, PlannedTensor
from quantkit.methods.gguf.target import Target, candidates, free_tensors
from quantkit.numerics.allocation import fewest_bytes, least_damage
from quantkit.system.cache import cache_folder
from quantkit.system.files import replace_text
from quantkit.system.sizes import bits_per_weight
from quantkit.untrusted import read_object

VERSION = 3  # of the estimate; another one makes kept scores worthless


def choose(job: Job, run: Run, plan: Plan, target: Target) -> dict[str, str]:
    """The type of each tensor by its name in the file; tells what was chosen and the divergence that is estimated."""
    free, rest = free_tensors(plan)
    scores = _scores(job, run, plan, free)
    kinds = [candidates(plan, tensor) for tensor in free]
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
    harm = sum(row[k] for row, k in zip(damage, chosen, strict=True))
    total = rest + sum(row[k] for row, k in zip(nbytes, chosen, strict=True))
    run.findings.note(
        f"types chosen by sensitivity: {bits_per_weight(total, job.source.parameters):.2f} bits per weight in tensors, "
        f"estimated divergence {harm:.4f} nats a token before error feedback"
    )
    return types


def _scores(job: Job, run: Run, plan: Plan, free: list[PlannedTensor]) -> Scores:
    """The estimates, from the user's cache where they are there."""
    kinds = {part: candidates(plan, tensor) for tensor in free for part in tensor.parts}
    path = _kept_at(job)
    cached = _read(path)
    if all(set(kinds[name]) <= set(cached.get(name, ())) for name in kinds):
        return cached

    def propose(name: str) -> Changes | None:
        return Changes(kinds[name], _changed) if name in kinds else None

    scores = sensitivity.sensitivities(job, run, propose)
    if missing := [name for name in kinds if name not in scores]:
        raise SourceError(f"{job.source.model}: no sensitivity was measured for {missing[0]}")
    if broken := [name for name, row in scores.items() if not all(map(math.isfinite, row.values()))]:
        raise SourceError(f"{job.source.model}: the sensitivity of {broken[0]} is not finite; its values overflow.")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(scores), shared=True)
    return scores


def _read(path: Path) -> Scores:
    """Kept scores; none where there is no file or it does not hold a finite number for each type of each tensor."""
    try:
        cached = read_object(path, RecipeError)
    except RecipeError:
        return {}
    if not all(isinstance(kinds, dict) and all(map(_is_score, kinds.values())) for kinds in cached.values()):
        return {}
    return {name: {kind: float(score) for kind, score in kinds.items()} for name, kinds in cached.items()}


def _is_score(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def work_bytes(job: Job, plan: Plan) -> int:
    """What the measurement puts into files while it runs: what flows into each block."""
    spec = job.recipe.calibration
    tokens = min(sensitivity.SEQUENCES, spec.sequences) * spec.length
    return (plan.shape.blocks + 1) * tokens * plan.shape.hidden * DTYPE.itemsize


def _changed(kind: str, weight: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """What ggml makes of a weight (N, K) float32."""
    weights = None if importance is None else without_silent_runs(importance.cpu().numpy())
    packed = ggml.quantize(kind, weight.cpu().contiguous().numpy(), weights)
    return torch.from_numpy(ggml.dequantize(kind, packed, weight.shape[1])).to(weight.device)


def _kept_at(job: Job) -> Path:
    """Where the scores of this source and text are kept."""
    digest = hashlib.sha256()
    for part in (VERSION, sensitivity.SEQUENCES, job.recipe.seed, sorted(job.source.hashes.items())):
        digest.update(f"{part}\n".encode())
    digest.update(tokens_of(job).digest.encode())
    return cache_folder() / "sensitivity" / f"{digest.hexdigest()[:32]}.json"
