"""Channel scales: scale up input channels with large activations, and fold the inverse into the layer before.

Paper: Lin et al., AWQ, arXiv:2306.00978 (section 3.2). Differences: the output error of each trial is computed exactly
from the input Hessian as tr(D H D^T), so no activations are stored; channel magnitudes are root mean squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from quantkit.calibration.block import Block
from quantkit.calibration.walk import exact_sequences
from quantkit.contracts.method import CheckedJob, Job, Shapes
from quantkit.errors import UnsupportedError
from quantkit.models.awq_mappings import Scaling, fold, heads_of, unscaled
from quantkit.models.skeleton import load
from quantkit.models.unfuse import expert_of
from quantkit.numerics.error_feedback import Feedback, FeedbackSettings
from quantkit.numerics.matmul import product_in, quick
from quantkit.system.ranks import ALONE, Shards

PANEL = 512  # columns of one product of a trial's loss
COARSE = 4  # step between exponents in the first round of trials
SAMPLED_ROWS = 256  # rows in a trial, spread evenly over the layers that share scales

# Returns a scaled weight, float32 (n, K), after rounding; importance (K,) weights the columns' errors.
Rounded = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ScaleSearch:
    """How scales are searched: `points` as in `search_scale`; `rounded(name)` rounds rows of the weight `name`.

    `feedback`: settings of the error feedback that follows, if any.
    """

    points: int
    rounded: Callable[[str], Rounded]
    feedback: FeedbackSettings | None = None

    def sequences(self, block: Block) -> int | None:
        """Return how many calibration sequences the search uses; None means all.

        With plain rounding, search and rounding share their Hessians, so all are used. Error feedback has its own
        Hessians; the search then uses only the share for earlier layers' errors. Experts use all, as each sees few
        tokens.
        """
        if self.feedback is None or any(expert_of(name) is not None for name in block.linears):
            return None
        sequences, length, _ = block.inputs.shape
        widest = max(layer.in_features for layer in block.linears.values())
        return exact_sequences(self.feedback.gptaq_share, sequences, length, widest)

    def costs(self, hessian: torch.Tensor) -> torch.Tensor:
        """Return what a trial's errors are multiplied with: H, or its diagonal (K,) after feedback.

        With error feedback, later columns absorb most of a column's error, and H is no longer needed.
        """
        if self.feedback is None:
            return hessian
        return Feedback(hessian, shrinkage=self.feedback.shrinkage, damp_percent=self.feedback.damp_percent).costs


def output_error(change: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Return E |change x|^2 = tr(change H change^T) as a float64 scalar tensor, without synchronizing the device.

    change is float32 (N, K); H = E[x x^T] is (K, K), float32 or in `quick` dtype, or its diagonal, float32 (K,).
    """
    if hessian.ndim == 1:
        return (change.square().sum(0) * hessian).sum(dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64, device=change.device)
    for left in range(0, change.shape[1], PANEL):
        spread = product_in(change[:, left : left + PANEL], hessian[left : left + PANEL, left:])
        spread[:, PANEL:] *= 2  # H is symmetric: the upper triangle also counts for the lower one
        total += spread.mul_(change[:, left:]).sum()
    return total


def share_heads(values: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Average (heads * d,) values over the query heads of each key-value head; return (kv_heads * d,)."""
    return values.reshape(kv_heads, heads // kv_heads, -1).mean(1).reshape(-1)


def repeat_heads(values: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Repeat (kv_heads * d,) values for all query heads of each key-value head; return (heads * d,)."""
    return values.reshape(kv_heads, 1, -1).expand(kv_heads, heads // kv_heads, -1).reshape(-1)


def over_heads(values: torch.Tensor, heads: tuple[int, int]) -> torch.Tensor:
    """Average (K,) values over query heads that share a value head, and repeat the means for these heads."""
    return repeat_heads(share_heads(values, *heads), *heads)


def search_scale(
    weights: list[torch.Tensor],
    hessian: torch.Tensor,
    rounded: Sequence[Rounded],
    points: int,
    heads: tuple[int, int],
    shards: Shards = ALONE,
) -> torch.Tensor:
    """Return the channel scales, float32 (K,), with the least output error of `weights` [(N, K)], each `rounded`.

    `hessian` as in `output_error`. Trials: no scaling, rms(x)^a, and rms(x)^a / mean|w|^(1-a), for `points` exponents a
    in (0, 1], first every COARSE-th, then those around the best. `heads` (query, key-value) ties the scales of query
    heads that share a value head; (1, 1) leaves all channels free. Ranks share the trials.
    """
    diagonal = hessian if hessian.ndim == 1 else torch.diagonal(hessian)
    rms = over_heads(diagonal.clamp(min=0).sqrt(), heads)
    rms = rms.clamp(min=float(rms.max()) * 1e-4 + 1e-12)
    size = over_heads(torch.cat(weights).abs().mean(0), heads)
    size = size.clamp(min=float(size.max()) * 1e-4 + 1e-12)
    near = hessian if hessian.ndim == 1 else quick(hessian)
    every = -(-sum(map(len, weights)) // SAMPLED_ROWS)
    weights = [weight[::every] for weight in weights]

    def trial(by_size: bool, point: int) -> torch.Tensor:
        a = point / points
        scale = rms**a / size ** (1 - a) if by_size else rms**a
        return scale / (scale.max() * scale.min()).sqrt()

    def loss(scale: torch.Tensor) -> torch.Tensor:
        importance = diagonal / scale.square()
        total = torch.zeros((), dtype=torch.float64, device=rms.device)
        for weight, after in zip(weights, rounded, strict=True):
            total += output_error(after(weight * scale, importance) / scale - weight, near)
        return total

    errors: dict[tuple[bool, int], float] = {}

    def best_of(kinds: tuple[bool, ...], exponents: Iterable[int]) -> tuple[bool, int]:
        more = [(kind, a) for a in exponents for kind in kinds if (kind, a) not in errors]
        found = torch.zeros(len(more), dtype=torch.float64, device=rms.device)
        for number in range(shards.rank, len(more), shards.size):
            found[number] = loss(trial(*more[number]))
        shards.sum(found)
        errors.update(zip(more, found.tolist(), strict=True))
        # If no trial has a finite error, take the first.
        return min(errors, key=lambda each: errors[each] if math.isfinite(errors[each]) else math.inf)

    best_of((False,), (0, points))  # of which the kinds are the same
    kind, point = best_of((False, True), range(points - COARSE, 0, -COARSE))
    kinds = (kind,) if 0 < point < points else (False, True)
    return trial(*best_of(kinds, range(max(1, point - COARSE + 1), min(points, point + COARSE))))


def _mean_hessian(hessians: dict[str, torch.Tensor], tokens: dict[str, int]) -> torch.Tensor:
    """Return the mean Hessian of layers that share a scale, weighted by the number of tokens each one saw."""
    if len(hessians) == 1:
        return next(iter(hessians.values()))
    total = sum(tokens[name] for name in hessians)
    return sum((hessian * (tokens[name] / total) for name, hessian in hessians.items()), start=torch.zeros(()))


def block_values(job: Job, block: Block) -> dict[str, torch.Tensor]:
    """Return all parameters of the unquantized block, float32, by full name."""
    names = (block.prefix + name for name, _ in block.module.named_parameters())
    return {name: load(job.source, job.skeleton, name).to(block.device, torch.float32) for name in names}


def scale_block(
    job: CheckedJob,
    block: Block,
    scalings: list[Scaling],
    values: dict[str, torch.Tensor],
    hessians: dict[str, torch.Tensor],
    search: ScaleSearch,
) -> None:
    """Search and apply scales: change the weights in `values` (float32, by full name) and input Hessians in place."""
    for scaling in scalings:
        names = [f"{block.prefix}{layer}.weight" for layer in scaling.layers]
        heads = heads_of(scaling, values, block.prefix, job.skeleton.model.config.get_text_config())
        seen = {name: hessians[name] for name in names if name in hessians}
        costs = search.costs(_mean_hessian(seen, block.moments.tokens))
        weights = [values[name] for name in names]
        scale = search_scale(weights, costs, [*map(search.rounded, names)], search.points, heads, job.shards)
        for hessian in seen.values():
            hessian /= scale[:, None] * scale[None, :]
        block.input_scales |= dict.fromkeys(names, scale)
        fold(scaling, values, block.prefix, scale, heads)


def unscaled_notes(job: Job, scalings: list[list[Scaling]]) -> tuple[str, ...]:
    """Return a note on layers whose inputs AWQ cannot scale; raise UnsupportedError if it can scale none."""
    count, left, names = unscaled(job.skeleton, scalings)
    if left == count:
        raise UnsupportedError(
            f"AWQ finds no layer in the blocks of {job.source.architecture!r} whose inputs it can scale without "
            "changing what the model computes"
        )
    if not left:
        return ()
    return (
        f"AWQ scales no inputs of {left} of {count} linear layers, because nothing "
        f"before them can take the inverse. They are only rounded: {', '.join(names)}",
    )


def scaling_bytes(shapes: Shapes) -> int:
    """Return the forecast of the peak memory in bytes: a block's weights, all Hessians, one trial."""
    squares = 8 * sum(columns**2 for _, columns in shapes.stages)
    return squares + 4 * shapes.block_parameters + 10 * 4 * shapes.largest_layer
