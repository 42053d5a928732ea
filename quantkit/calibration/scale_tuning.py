"""Scales tuned end to end: with all codes held, the model's outputs are brought near the source's.

Minimizes the Kullback-Leibler divergence of the quantized model's next-token distribution from the source's on the
calibration text, over the scales of all layers at once, by Adam (Kingma and Ba, arXiv:1412.6980). Training the step
sizes of a quantized model end to end is the second phase of EfficientQAT (Chen et al., arXiv:2407.11062); here the
source's distribution is the target instead of the text's tokens. One decoder block is in memory at a time: the forward
pass keeps what flows into each block, the backward pass runs each block once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import nn

from quantkit.calibration.activations import DTYPE, Activations
from quantkit.calibration.inputs import Arguments, Head, call_block, embed, hidden_of
from quantkit.calibration.tokens import tokens_of
from quantkit.contracts.format import TensorWriter
from quantkit.contracts.method import Job, Shapes
from quantkit.contracts.run import Run
from quantkit.models.skeleton import load_block, unload_block
from quantkit.numerics.grid import stored_scale
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.numerics.kl_divergence import divergence
from quantkit.system.memory import trim_heap

HELD_OUT = 16  # one sequence in so many is only looked at
BATCH_TOKENS = 4096
HEAD_TOKENS = 256  # whose logits are in memory
EVERY = 15  # steps between looks at the held-out part
WARM_UP = 5  # steps until the full rate
BETAS = (0.9, 0.95)

Values = Callable[[str], Mapping[str, torch.Tensor | GroupedWeight]]


@dataclass(frozen=True)
class Tuning:
    """Number of steps, and the largest share of itself that a scale moves in one; it falls to zero as a cosine."""

    steps: int
    rate: float = 1e-3


class _Scales:
    """The scales of one layer under training: scale * (1 + stretch), with Adam's two moments; all (N, G) float32."""

    def __init__(self, scales: torch.Tensor) -> None:
        self.scale = scales.to(torch.float32)
        self.stretch, self.first, self.second = (torch.zeros_like(self.scale) for _ in range(3))
        self.best = self.stretch.clone()

    def stored(self) -> torch.Tensor:
        """As the artifact stores them."""
        return stored_scale(self.scale * (1 + self.stretch))

    def step(self, gradient: torch.Tensor, rate: float, count: int) -> None:
        """Adam's step `count` (from 1) against the loss's gradient by the stretch."""
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        mean = self.first / (1 - BETAS[0] ** count)
        size = (self.second / (1 - BETAS[1] ** count)).sqrt_()
        self.stretch.sub_(mean / (size + 1e-12), alpha=rate)


class _Blocks:
    """The quantized blocks, of which one has its weights at a time, and their scales under training."""

    def __init__(self, job: Job, values: Values, arguments: list[Arguments]) -> None:
        self.scales: dict[str, _Scales] = {}
        self.return_tuples = False  # what the last block that ran returned
        self._job, self._values, self._arguments, self._skeleton = job, values, arguments, job.skeleton
        self._device = torch.device(job.device)

    def __len__(self) -> int:
        return len(self._skeleton.blocks)

    def module(self, index: int) -> nn.Module:
        """Block `index`."""
        return self._skeleton.blocks[index]

    def prefix(self, index: int) -> str:
        """What the full names of its parameters begin with."""
        return self._skeleton.block_prefix(index)

    def run(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D) through block `index`, which holds its weights."""
        out = call_block(self._skeleton.blocks[index], self._arguments[index], hidden.to(self._device))
        self.return_tuples = isinstance(out, tuple)
        return hidden_of(out)

    def through(self, hidden: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(B, T, D) -> (B, T, D) through all quantized blocks, and what flows into each."""
        flows: list[torch.Tensor] = []
        for index in range(len(self)):
            flows.append(hidden)
            self.load(index)
            hidden = self.run(index, hidden)
            self.unload(index)
        return hidden, flows

    def load(self, index: int) -> dict[str, GroupedWeight]:
        """Give block `index` its weights, quantized with the scales as they are now; return the quantized layers."""
        prefix = self.prefix(index)
        stored = self._values(prefix)
        layers: dict[str, GroupedWeight] = {}

        def now(name: str) -> torch.Tensor | None:
            value = stored.get(name)
            if not isinstance(value, GroupedWeight):
                return value
            if name not in self.scales:
                self.scales[name] = _Scales(value.scales)
            layer = layers[name.removeprefix(prefix)] = replace(value, scales=self.scales[name].stored())
            return layer.dense()

        load_block(self._job.source, self._skeleton, index, self._device, DTYPE, now)
        return layers

    def unload(self, index: int) -> None:
        """Take its weights from block `index`."""
        unload_block(self._skeleton.blocks[index])


def tuning_bytes(shapes: Shapes) -> int:
    """What tuning holds at its peak beside the process, for the forecast: mostly one block's backward pass."""
    flows = shapes.blocks * BATCH_TOKENS * shapes.hidden * 2
    head = shapes.vocabulary * (shapes.hidden * 2 + HEAD_TOKENS * 2 * 3)
    graph = BATCH_TOKENS * (12 * shapes.hidden + 6 * shapes.widest) * 2
    return flows + head + graph + 4 * shapes.block_parameters + 12 * shapes.largest_layer


def tune(job: Job, run: Run, values: Values, tuning: Tuning, targets: Activations) -> dict[str, torch.Tensor]:
    """Return the tuned scales (N, G) float32 of every quantized layer, by weight name.

    values(prefix) gives the quantized model's parameters of the block with that prefix, by full name; what it leaves
    out is the source's. `targets` is what comes out of the source's last block. Where the held-out part of the
    calibration does not get better, the scales stay.
    """
    ids, device = torch.from_numpy(tokens_of(job).ids), torch.device(job.device)
    path = run.folder / "tuning.offload"
    inputs, arguments = embed(job.source, job.skeleton, ids, device, lambda _size: path)
    blocks = _Blocks(job, values, arguments)
    title = f"{job.method.name}: tuning the scales end to end"
    with closing(inputs), run.progress.step(title, tuning.steps) as advance, torch.no_grad():
        _train(blocks, Head(job.source, job.skeleton, device), inputs, targets, tuning, job.recipe.seed, advance)
    trim_heap()
    return {name: stored_scale(s.scale * (1 + s.best)) for name, s in blocks.scales.items()}


def tune_scales(job: Job, run: Run, writer: TensorWriter, steps: int, targets: Activations) -> None:
    """Tune the scales of the layers of codes that are all in `writer`, and put them there."""
    for name, scales in tune(job, run, writer.block, Tuning(steps), targets).items():
        writer.replace_scales(name, scales)


def _train(
    blocks: _Blocks,
    head: Head,
    inputs: Activations,
    targets: Activations,
    tuning: Tuning,
    seed: int,
    advance: Callable[..., None],
) -> None:
    step_size = max(1, BATCH_TOKENS // inputs.shape[1])
    held = list(range(HELD_OUT - 1, len(inputs), HELD_OUT))
    trained = [i for i in range(len(inputs)) if i not in set(held)]

    def batch(store: Activations, sequences: list[int]) -> torch.Tensor:
        return torch.cat([store.read(i, i + 1) for i in sequences])

    def look() -> float:
        total = 0.0
        for start in range(0, len(held), step_size):
            part = held[start : start + step_size]
            x, _ = blocks.through(batch(inputs, part))
            total += _divergence(blocks, head, x, batch(targets, part), None) * len(part)
        return total / max(1, len(held))

    first = best = look()
    generator = torch.Generator().manual_seed(seed)
    queue: list[int] = []
    for step in range(tuning.steps):
        if len(queue) < step_size:
            queue = [trained[i] for i in torch.randperm(len(trained), generator=generator).tolist()]
        chosen, queue = queue[:step_size], queue[step_size:]
        rate = tuning.rate * min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / tuning.steps)) / 2
        _step(blocks, head, batch(inputs, chosen), batch(targets, chosen), rate, step + 1)
        if (step + 1) % EVERY == 0 or step + 1 == tuning.steps:
            now = look()
            if now < best:
                best = now
                for scales in blocks.scales.values():
                    scales.best = scales.stretch.clone()
        advance(remark=f"held-out divergence {best:.4f}, at first {first:.4f}")


def _step(blocks: _Blocks, head: Head, x: torch.Tensor, target: torch.Tensor, rate: float, count: int) -> None:
    """One step of all scales on a batch with inputs and targets (B, T, D)."""
    x, flows = blocks.through(x)
    slope = torch.empty_like(x)
    _divergence(blocks, head, x, target, slope)
    for index in reversed(range(len(blocks))):
        slope = _backward(blocks, index, flows.pop(), slope, rate, count)


def _backward(
    blocks: _Blocks, index: int, x: torch.Tensor, slope: torch.Tensor, rate: float, count: int
) -> torch.Tensor:
    """Step block `index`'s scales; the loss's gradient by its inputs (B, T, D) from that by its outputs."""
    layers = blocks.load(index)
    prefix, module = blocks.prefix(index), blocks.module(index)
    parameters = [module.get_parameter(name).requires_grad_() for name in layers]
    x = x.to(slope.device).detach().requires_grad_()
    with torch.enable_grad():
        out = blocks.run(index, x)
    before, *gradients = torch.autograd.grad(out, [x, *parameters], slope)
    blocks.unload(index)
    for (name, layer), gradient in zip(layers.items(), gradients, strict=True):
        scales = blocks.scales[prefix + name]
        # By the stretch: sum over the group of dL/dW (code - zero) scale.
        sums = layer.sums(layer.steps().mul_(gradient.cpu()))
        scales.step(sums * scales.scale, rate, count)
    return before


def _divergence(
    blocks: _Blocks, head: Head, hidden: torch.Tensor, target: torch.Tensor, slope: torch.Tensor | None
) -> float:
    """Mean divergence over all positions of (B, T, D) from the source's; with `slope`, its gradient goes there."""
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), target.to(hidden.device).reshape(-1, hidden.shape[-1])
    total = 0.0
    for start in range(0, len(flat), HEAD_TOKENS):
        part = slice(start, start + HEAD_TOKENS)
        exact = head.logits(wanted[part], blocks.return_tuples)
        x = flat[part].detach().requires_grad_(slope is not None)
        with torch.set_grad_enabled(slope is not None):
            ours = head.logits(x, blocks.return_tuples)
        total += divergence(exact, ours.detach(), None if slope is None else exact)
        if slope is not None:
            slope.view_as(flat)[part] = torch.autograd.grad(ours, x, exact.div_(len(flat)))[0]
    return total / len(flat)
