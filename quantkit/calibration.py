"""Calibration: one walk over the decoder blocks in order, with one block and its activations in memory at a time.

`walk` yields each block with its weights loaded. The method asks it for statistics of its linear layers' inputs,
may replace weights by quantized ones, and the walk then computes the next block's inputs with the block as it is
now, so that later blocks are calibrated on what they will really see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quantkit.errors import SourceError, UnsupportedError
from quantkit.registry import Job
from quantkit.skeleton import Skeleton, open_skeleton, set_parameter, source_name
from quantkit.source import Source
from quantkit.text import calibration_tokens

BATCH_TOKENS = 4096
DTYPE = torch.bfloat16  # of activations and of the blocks' arithmetic; statistics are float32


class _Enough(Exception):  # noqa: N818 - a signal, not an error
    """Ends a forward pass early: the last input that was asked for has been seen."""


class _Recorder(nn.Module):
    """Stands for a block: keeps the arguments it is called with and passes the hidden states through."""

    def __init__(self) -> None:
        super().__init__()
        self.kwargs: dict[str, Any] = {}
        self.hidden = torch.empty(0)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            raise UnsupportedError("the decoder blocks of this architecture take positional arguments")
        self.hidden, self.kwargs = hidden_states, kwargs
        return hidden_states


@dataclass
class Block:
    """Block `index` with real weights. `linears` are its linear layers by full weight name."""

    index: int
    prefix: str
    module: nn.Module
    inputs: torch.Tensor
    kwargs: dict[str, Any]
    config: Any
    linears: dict[str, nn.Linear] = field(default_factory=dict)

    def forward(self, told: Callable[[torch.Tensor], None] = lambda _: None) -> None:
        """Run the block over all calibration inputs, handing each batch of outputs to `told`."""
        step = max(1, BATCH_TOKENS // self.inputs.shape[1])
        with torch.no_grad():
            for start in range(0, len(self.inputs), step):
                batch = self.inputs[start : start + step]
                kwargs = {key: _for_batch(value, len(batch)) for key, value in self.kwargs.items()}
                try:
                    out = self.module(batch, **kwargs)
                except _Enough:
                    continue
                told(out[0] if isinstance(out, tuple) else out)

    def stages(self) -> list[list[str]]:
        """Linear layers in the order of execution; those that get the same input stand together."""
        seen: list[tuple[torch.Tensor, list[str]]] = []

        def note(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
                for tensor, names in seen:
                    if tensor is args[0]:
                        names.append(name)
                        return
                seen.append((args[0], [name]))

            return hook

        handles = [module.register_forward_pre_hook(note(name)) for name, module in self.linears.items()]
        kwargs = {key: _for_batch(value, 1) for key, value in self.kwargs.items()}
        with torch.no_grad():
            self.module(self.inputs[:1], **kwargs)
        for handle in handles:
            handle.remove()
        return [names for _, names in seen]

    def collect(self, names: list[str], gather: Callable[[str, torch.Tensor], None]) -> None:
        """Hand (weight name, inputs (tokens, K) float32) of the named layers to `gather`.

        `names` are in the order of execution; the block runs only as far as the last one's input.
        """
        handles = []
        for name in names:

            def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                gather(name, args[0].reshape(-1, args[0].shape[-1]).to(torch.float32))
                if name == names[-1]:
                    raise _Enough

            handles.append(self.linears[name].register_forward_pre_hook(hook))
        try:
            self.forward()
        finally:
            for handle in handles:
                handle.remove()

    def hessians(self, stages: list[list[str]]) -> dict[str, torch.Tensor]:
        """H = mean of x x^T over all calibration tokens, (K, K) float32, for each stage under its first name.

        Raises SourceError where the inputs of a layer are not finite.
        """
        sums: dict[str, torch.Tensor] = {}
        counts: dict[str, int] = {}

        def gather(name: str, x: torch.Tensor) -> None:
            if name not in sums:
                sums[name] = torch.zeros(x.shape[1], x.shape[1])
                counts[name] = 0
            sums[name].addmm_(x.T, x)
            counts[name] += len(x)

        self.collect([names[0] for names in stages], gather)
        for name, total in sums.items():
            if not bool(torch.isfinite(total).all()):
                raise SourceError(f"the inputs of {name} are not finite on the calibration text; the model overflows")
            total.div_(counts[name])
        return sums

    def replace(self, name: str, value: torch.Tensor) -> None:
        """Put another parameter in place; later statistics and blocks see it."""
        set_parameter(self.module, name.removeprefix(self.prefix), value.to(DTYPE))


def _for_batch(value: Any, size: int) -> Any:
    """Spread arguments that were recorded for one sequence over a batch of `size`."""
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == 1 and size > 1:
        return value.expand(size, *value.shape[1:])
    if isinstance(value, tuple):
        return tuple(_for_batch(part, size) for part in value)
    return value


def _enter(source: Source, skeleton: Skeleton, ids: torch.Tensor) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Embed (S, T) ids -> (S, T, hidden) and record each block's keyword arguments."""
    recorders = [_Recorder() for _ in skeleton.blocks]
    kept = list(skeleton.blocks)
    blocks = skeleton.blocks
    base = skeleton.model.base_model
    for i, recorder in enumerate(recorders):
        blocks[i] = recorder
    loaded: list[tuple[str, torch.Tensor]] = []
    for name, parameter in list(base.named_parameters()):
        loaded.append((name, parameter))
        full = source_name(source, skeleton, f"{skeleton.model.base_model_prefix}.{name}")
        set_parameter(base, name, source.tensor(full).to(DTYPE))
    hidden = []
    with torch.no_grad():
        for row in ids:
            base(input_ids=row[None], use_cache=False)
            hidden.append(recorders[0].hidden.to(DTYPE))
    for i, block in enumerate(kept):
        blocks[i] = block
    for name, parameter in loaded:
        set_parameter(base, name, parameter.data)
    return torch.cat(hidden), [recorder.kwargs for recorder in recorders]


def walk(job: Job) -> Iterator[Block]:
    """Yield the blocks in order, each with its weights; its outputs are computed when the next one is asked for."""
    source = job.source
    skeleton = open_skeleton(source.config)
    ids, remark = calibration_tokens(source.tokenizer(), job.recipe.calibration, job.recipe.seed)
    job.tell(remark)
    hidden, kwargs = _enter(source, skeleton, torch.from_numpy(ids))
    with job.progress.step(f"{job.recipe.method}: calibrating blocks", len(skeleton.blocks)) as advance:
        for index, module in enumerate(skeleton.blocks):
            prefix = skeleton.block_prefix(index)
            meta = {name: parameter.data for name, parameter in module.named_parameters()}
            for name in meta:
                full = source_name(source, skeleton, prefix + name)
                set_parameter(module, name, source.tensor(full).to(DTYPE))
            linears = {
                f"{prefix}{name}.weight": child
                for name, child in module.named_modules()
                if isinstance(child, nn.Linear)
            }
            block = Block(index, prefix, module, hidden, kwargs[index], skeleton.model.config, linears)
            yield block
            if index + 1 < len(skeleton.blocks):
                outputs: list[torch.Tensor] = []
                block.forward(outputs.append)
                hidden = torch.cat(outputs)
            for name, value in meta.items():
                set_parameter(module, name, value)
            advance()


def importance(job: Job) -> dict[str, torch.Tensor]:
    """Mean squared input of every linear layer in the blocks: weight name -> (K,) float32."""
    found: dict[str, torch.Tensor] = {}
    for block in walk(job):
        stages = block.stages()
        sums: dict[str, torch.Tensor] = {}
        counts: dict[str, int] = {}

        def gather(name: str, x: torch.Tensor, sums: Any = sums, counts: Any = counts) -> None:
            sums[name] = sums.get(name, 0) + x.square().sum(0)
            counts[name] = counts.get(name, 0) + len(x)

        block.collect([names[0] for names in stages], gather)
        for names in stages:
            for name in names:
                found[name] = sums[names[0]] / counts[names[0]]
    return found
