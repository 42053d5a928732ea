"""Tune scales end to end: with fixed codes, bring the quantized model's outputs close to the source's.

Minimizes the Kullback-Leibler divergence of the quantized model's next-token distribution from the source's on the
calibration text, over the scales of all layers at once, by Adam. End-to-end training
of step sizes is the second phase of EfficientQAT (Chen et al., arXiv:2407.11062); here the source's distribution is the
target instead of the text's tokens. One decoder block is in memory at a time: the forward pass stores each block's
inputs, and the backward pass runs each block again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from quantkit.calibration.activations import DTYPE, Activations
from quantkit.calibration.learned_codes import SoftFactors, Tunable
from quantkit.calibration.learned_options import Learned
from quantkit.calibration.learned_rounding import HeldOut, learning_bytes, train
from quantkit.calibration.passes import Passes, SourceValues, embed
from quantkit.calibration.tokens import tokens_of
from quantkit.calibration.walk import own_sequences
from quantkit.contracts.format import TensorWriter
from quantkit.contracts.method import CheckedJob, Shapes
from quantkit.contracts.run import Run
from quantkit.models.output_head import load_head
from quantkit.numerics.quantized_weight import ScaledWeight
from quantkit.system.memory import MemoryTrimmer, trim_heap

HELD_OUT = HeldOut(share=16, interval=15)
BATCH_TOKENS = 2048
PASS_TOKENS = 1024  # tokens of a batch that pass a block together
HEAD_TOKENS = 256  # tokens whose logits are in memory
SLAB_ELEMENTS = 1 << 19  # logits processed at a time, so that they stay in the processor's cache
WARM_UP = 5  # steps until the full rate

Values = Callable[[str], Mapping[str, torch.Tensor | Tunable | ScaledWeight]]


@dataclass(frozen=True)
class Tuning:
    """Hyperparameters: number of steps, and the first relative step of a 4-bit scale, which decays as a cosine."""

    steps: int
    rate: float = 2e-3


class _Factors(SoftFactors):
    """Factors of one layer in training, and the best so far."""

    def __init__(self, layer: Tunable) -> None:
        super().__init__(layer.factors)
        self.pace = 2.0 ** max(0, 4 - layer.bits)  # relative distance of codes, compared with 4 bits
        self.best = self.stored()

    def step(self, slopes: torch.Tensor, rate: float, count: int) -> None:
        """Take Adam's step number `count` (from 1); `slopes` (N, F) is the loss's gradient by the factors."""
        self.step_factors(slopes, rate * self.pace, count)


class _ScaleStudent:
    """The quantized model with its scales in training; one block's weights are in memory at a time.

    `inputs`: the first block's inputs; `targets`: the outputs of the source's last block.
    """

    def __init__(
        self,
        job: CheckedJob,
        values: Values,
        tuning: Tuning,
        inputs: Activations,
        targets: Activations,
        tell: Callable[[float, float], None],
    ) -> None:
        self.factors: dict[str, _Factors] = {}
        self.report = tell
        self._inputs, self._targets, self._tuning = inputs, targets, tuning
        self._skeleton, self._values, self._shards = job.skeleton, values, job.shards
        self._passes = Passes(job, PASS_TOKENS)
        self._trimmer = MemoryTrimmer()
        self._head = load_head(job.source, job.skeleton, self._passes.device, DTYPE)

    def measure(self, sequences: list[int]) -> float:
        hidden = self._inputs.chosen(sequences)
        for index in range(len(self._skeleton.blocks)):
            with self._block(index):
                self._passes.forward(index, hidden, hidden)
        return self._divergence(hidden, self._targets.select(sequences))

    def step(self, number: int, sequences: list[int], _first: float) -> None:
        tuning, inputs = self._tuning, self._inputs.chosen(sequences)
        rate = tuning.rate * min(1.0, (number + 1) / WARM_UP) * (1 + math.cos(math.pi * number / tuning.steps)) / 2
        flows = [inputs]
        for index in range(len(self._skeleton.blocks)):
            flows.append(inputs.like())
            with self._block(index):
                self._passes.forward(index, flows[index], flows[index + 1])
        slopes = flows.pop()
        self._divergence(slopes, self._targets.select(sequences), as_slopes=True)
        for index in reversed(range(len(self._skeleton.blocks))):
            with self._block(index) as layers:
                parameters = [self._skeleton.model.get_parameter(name).requires_grad_() for name in layers]
                gradients = _added(self._passes.backward(index, flows.pop(), slopes, parameters))
            for (name, layer), gradient in zip(layers.items(), gradients, strict=True):
                sums = layer.factor_slopes(gradient.cpu(), layer.codes.float()).contiguous()
                self._shards.sum(sums)
                self.factors[name].step(sums / self._shards.size, rate, number + 1)

    def keep(self) -> None:
        for factors in self.factors.values():
            factors.best = factors.stored()

    @contextmanager
    def _block(self, index: int) -> Iterator[dict[str, Tunable]]:
        """Load block `index` with the current scales; yield its quantized layers by weight name."""
        stored = self._values(self._skeleton.block_prefix(index))
        layers: dict[str, Tunable] = {}

        def now(name: str) -> torch.Tensor | None:
            value = stored.get(name)
            if not isinstance(value, Tunable):
                return None if value is None else value if isinstance(value, torch.Tensor) else value.dense()
            layers[name] = value
            if name not in self.factors:
                self.factors[name] = _Factors(value)
            return value.values(value.codes.float(), self.factors[name].stored())

        with self._passes.block(index, now):
            yield layers
        self._trimmer.trim()

    def _divergence(self, hidden: Activations, targets: torch.Tensor, as_slopes: bool = False) -> float:
        """Return the mean divergence, nats per token; `as_slopes`: overwrite `hidden` with gradients w.r.t. it."""
        states = hidden.read()
        flat, exact = (x.to(self._passes.device).flatten(-3, -2) for x in (states, targets))
        slopes = torch.empty_like(flat) if as_slopes else None
        total, tokens = 0.0, flat.shape[-2]
        for start in range(0, tokens, HEAD_TOKENS):
            part = ..., slice(start, start + HEAD_TOKENS), slice(None)
            theirs = self._head.logits(exact[part], self._passes.as_tuple)
            given = flat[part].detach().requires_grad_(as_slopes)
            with torch.set_grad_enabled(as_slopes):
                ours = self._head.logits(given, self._passes.as_tuple)
            total += divergence(theirs, ours.detach(), theirs if as_slopes else None)
            if slopes is not None:
                slopes[part] = torch.autograd.grad(ours, given, theirs.div_(tokens))[0]
        if slopes is not None:
            hidden.write(0, slopes.reshape(states.shape))
        return total / tokens


def _added(batches: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    sums: list[torch.Tensor] = []
    for values in batches:
        if not sums:
            sums = [torch.zeros_like(value, dtype=torch.float32) for value in values]
        for total, value in zip(sums, values, strict=True):
            total += value
    return sums


def refining_bytes(options: Learned, shapes: Shapes) -> int:
    """Return the forecast of the peak memory in bytes of learned rounding and scale tuning, as far as wanted."""
    return max(learning_bytes(shapes) if options.learned else 0, _tuning_bytes(shapes) if options.tuned else 0)


def _tuning_bytes(shapes: Shapes) -> int:
    """Return the forecast of tuning's peak memory in bytes, mostly one block's backward pass."""
    flows = shapes.blocks * BATCH_TOKENS * shapes.hidden * 2
    head = shapes.vocabulary * (shapes.hidden * 2 + HEAD_TOKENS * 2 * 3)
    graph = PASS_TOKENS * (12 * shapes.hidden + 6 * shapes.widest) * 2
    return flows + head + graph + 8 * shapes.block_parameters + 12 * shapes.largest_layer


def divergence(exact: torch.Tensor, ours: torch.Tensor, gradient: torch.Tensor | None = None) -> float:
    """Return the sum over rows of KL(softmax(exact) || softmax(ours)) in nats, for logits (n, V), in float32.

    `gradient` (n, V), if given, gets the gradient w.r.t. `ours`: softmax(ours) - softmax(exact). It may be `exact`.
    """
    total = 0.0
    step = max(1, SLAB_ELEMENTS // exact.shape[1])
    for start in range(0, len(exact), step):
        rows = slice(start, start + step)
        apart, log_q = (logits[rows].to(torch.float32, copy=True) for logits in (exact, ours))
        for values in (apart, log_q):
            values.sub_(values.logsumexp(-1, keepdim=True))
        p = apart.exp()
        total += float(torch.dot(p.view(-1), apart.sub_(log_q).view(-1)))
        if gradient is not None:
            gradient[rows] = log_q.exp_().sub_(p)
    return total


def tune(job: CheckedJob, run: Run, values: Values, tuning: Tuning, targets: Activations) -> dict[str, torch.Tensor]:
    """Return the tuned factors (N, F) float32 of every quantized layer, by weight name.

    values(prefix) returns the quantized model's parameters of the block with that name prefix, by full name; all other
    parameters are the source's. `targets`: outputs of the source's last block. The scales stay as they are unless the
    loss on held-out sequences improves. With several processes, each has the `targets` of its own sequences.
    """
    path, every = run.folder / "tuning.offload", tokens_of(job).ids
    ids, device = torch.from_numpy(own_sequences(every, len(every), job.shards)[0]), torch.device(job.device)
    inputs = embed(SourceValues(job.source, job.skeleton), job.skeleton, ids, device, path)
    title = f"{job.method.name}: tuning the scales end to end"
    with closing(inputs), run.progress.step(title, tuning.steps) as advance, torch.no_grad():

        def tell(first: float, best: float) -> None:
            advance(remark=f"held-out divergence {best:.4f}, at first {first:.4f}")

        student = _ScaleStudent(job, values, tuning, inputs, targets, tell)
        batch = max(1, BATCH_TOKENS // inputs.shape[1])
        train(student, len(inputs), batch, tuning.steps, HELD_OUT, job.recipe.seed, job.shards)
    trim_heap()
    return {name: factors.best for name, factors in student.factors.items()}


def tune_scales(job: CheckedJob, run: Run, writer: TensorWriter, steps: int, targets: Activations) -> None:
    """Tune the scales of all quantized layers in `writer` for `steps` steps, and replace them there."""
    for name, scales in tune(job, run, writer.block, Tuning(steps), targets).items():
        writer.replace_scales(name, scales)
