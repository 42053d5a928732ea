"""Calibration: one walk over the decoder blocks in order, with one block and its activations in memory at a time.

`walk` yields each block with its weights loaded. The method asks it for statistics of its linear layers' inputs,
may replace weights by quantized ones, and the walk then computes the next block's inputs with the block as it is
now, so that later blocks are calibrated on what they will really see. With `exact` a second stream of activations
goes through the unquantized blocks beside it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from quantkit.activations import DTYPE, Activations
from quantkit.core.gram import Gram
from quantkit.entry import call_block, enter, hidden_of
from quantkit.errors import SourceError
from quantkit.freed import give_back_freed
from quantkit.linears import expert_of, same_of_every_expert
from quantkit.registry import Job
from quantkit.skeleton import Skeleton, load, open_skeleton, set_parameter
from quantkit.text import calibration_tokens
from quantkit.waiting import PAST, Shelf, Waiting, stop_here, storages_in

BATCH_TOKENS = 2048
LEAST_TOKENS = 5  # for each column of the widest layer, in the unquantized stream
FEW_TOKENS = 128  # an expert that saw fewer is calibrated on what all experts of its block saw

Restore = Callable[[int, str], dict[str, torch.Tensor] | None]


class _Enough(Exception):  # noqa: N818 - a signal, not an error
    """Ends a forward pass early: the last input that was asked for has been seen."""


@dataclass(frozen=True)
class Stage:
    """Linear layers `names` that get the same input: its H = E[x x^T] (K, K) float32.

    cross is E[(exact - x) x^T] (K, K) float32, exact being the input in the unquantized model, or None. Where it is
    known for some inputs only, `paired` is the E[x x^T] of those.
    """

    names: list[str]
    hessian: torch.Tensor
    cross: torch.Tensor | None = None
    paired: torch.Tensor | None = None


@dataclass
class Block:
    """Block `index` with real weights. `linears` are its linear layers by full weight name.

    `exact` and `exact_inputs` are the unquantized block and what flows into it there, where the walk keeps them: the
    first sequences, or all of them. Batches that wait beyond the shelf's room wait in its file. Where twice `ample`
    tokens a column have come to a layer that is no expert, `visit` takes every second one (0: always all).
    `few` is told each layer of an expert that saw too few tokens; `tokens` counts those of the latest `hessians`.
    """

    index: int
    prefix: str
    module: nn.Module
    inputs: Activations
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    skeleton: Skeleton
    device: torch.device
    shelf: Shelf
    ample: int = 0
    linears: dict[str, nn.Linear] = field(default_factory=dict)
    exact: nn.Module | None = None
    exact_inputs: Activations | None = None
    few: Callable[[str], None] = lambda _name: None
    tokens: dict[str, int] = field(default_factory=dict)
    _shared: dict[str, Gram] = field(default_factory=dict)
    _done: bool = False
    _exact_done: bool = False

    def batches(self) -> list[tuple[int, int]]:
        """Bounds of the sequences that go through the block together."""
        step = max(1, BATCH_TOKENS // self.inputs.shape[1])
        return [(start, min(start + step, len(self.inputs))) for start in range(0, len(self.inputs), step)]

    def call(self, module: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D) through `module`, the block or another with the same arguments."""
        return hidden_of(call_block(module, (self.args, self.kwargs), hidden.to(self.device)))

    def forward(self, told: Callable[[int, torch.Tensor], None] = lambda _start, _out: None) -> None:
        """Run the block over all calibration inputs, handing (first sequence, outputs) of each batch to `told`."""
        with torch.no_grad():
            for start, stop in self.batches():
                try:
                    out = self.call(self.module, self.inputs.read(start, stop))
                except _Enough:
                    continue
                told(start, out)

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
        with torch.no_grad():
            self.call(self.module, self.inputs.read(0, 1))
        for handle in handles:
            handle.remove()
        return [names for _, names in seen]

    def collect(self, names: list[str], gather: Callable[[str, torch.Tensor], None]) -> None:
        """Hand (weight name, inputs (tokens, K)) of the named layers to `gather`, batch by batch.

        `names` are in the order of execution; the block runs only as far as the last one's input.
        """
        handles = []
        for name in names:

            def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                gather(name, args[0].reshape(-1, args[0].shape[-1]))
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
        grams = {names[0]: self._gram(names[0]) for names in stages}
        self.collect(list(grams), lambda name, x: grams[name].add(x))
        self.tokens = {name: gram.tokens for name, gram in grams.items()}
        return {name: self._stage([name], gram).hessian for name, gram in grams.items()}

    def visit(self, visitor: Callable[[Stage], None], *, keep_outputs: bool = True) -> None:
        """Stop before each stage of the block, in the order of execution, and hand its statistics to `visitor`.

        The visitor may replace the stage's weights; what follows in the block then runs with the new ones (true
        sequential). All batches wait at the stage with what they have computed so far. With `keep_outputs` the next
        block's inputs are ready afterwards.
        """
        stages, pairs, shelf = self.stages(), self._set_out(), self.shelf
        shelf.common = self._common()
        step = self.batches()[0][1]
        handles = list(self._stop_at(stages))
        try:
            with torch.no_grad():
                for at, names in enumerate(stages):
                    gram, stride = self._gram(names[0], self.exact is not None), self._stride(names[0])
                    for number, (batch, twin) in enumerate(pairs):
                        batch.go_to(at, shelf)
                        if twin is not None:
                            twin.go_to(at, shelf)
                        _add(gram, names[0], batch, twin, at, stride)
                        if at + 1 == len(stages) and twin is not None:
                            # Nothing waits for the unquantized block any more.
                            twin.go_to(PAST, shelf)
                            self._write_exact(number * step, twin.take())
                        for one in (batch, twin):
                            if one is not None:
                                shelf.arrived(one)
                    stage = self._stage(names, gram)
                    del gram
                    visitor(stage)
                    del stage
                    give_back_freed()
                self._exact_done = self.exact is not None
                for number, (batch, _) in enumerate(pairs if keep_outputs else ()):
                    batch.go_to(PAST, shelf)
                    self.inputs.write(number * step, batch.take())
                self._done = keep_outputs
        finally:
            for handle in handles:
                handle.remove()
            for waiting in (one for pair in pairs for one in pair if one is not None):
                waiting.end()
            shelf.clear()

    def finish(self) -> None:
        """Turn the inputs of this block into those of the next one, in both streams."""
        if not self._done:
            self.forward(self.inputs.write)
            if self.exact is not None:
                self.targets()
        self._done = True

    def targets(self) -> Activations:
        """The outputs of the unquantized block, which are the exact stream's inputs of the next one."""
        assert self.exact is not None
        assert self.exact_inputs is not None
        if not self._exact_done:
            with torch.no_grad():
                for start, stop in self.batches():
                    if stop <= len(self.exact_inputs):
                        self.exact_inputs.write(start, self.call(self.exact, self.exact_inputs.read(start, stop)))
        self._exact_done = True
        return self.exact_inputs

    def call_with(self, parameters: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D) through the block with other values of some parameters, given by full name."""
        named = {name.removeprefix(self.prefix): value for name, value in parameters.items()}
        return self.call(lambda *args, **kwargs: torch.func.functional_call(self.module, named, args, kwargs), hidden)

    def replace(self, name: str, value: torch.Tensor) -> None:
        """Put another parameter in place; later statistics and blocks see it."""
        set_parameter(self.module, name.removeprefix(self.prefix), value.to(self.device, DTYPE))

    def _stride(self, name: str) -> int:
        sequences, length, _ = self.inputs.shape
        enough = 2 * self.ample * self.linears[name].in_features
        return 2 if self.ample and expert_of(name) is None and sequences * length >= enough else 1

    def _gram(self, name: str, cross: bool = False) -> Gram:
        return Gram(self.linears[name].in_features, self.device, cross)

    def _stage(self, names: list[str], gram: Gram) -> Stage:
        enough = self._enough(names[0], gram)
        shared = enough is not gram
        hessian = enough.mean(shared)
        if not bool(torch.isfinite(hessian).all()):
            raise SourceError(f"the inputs of {names[0]} are not finite on the calibration text; the model overflows")
        return Stage(names, hessian, enough.cross(shared), enough.paired(shared))

    def _enough(self, name: str, gram: Gram) -> Gram:
        """The statistics of a layer or, for an expert that saw too few tokens, those of all experts of its block."""
        if expert_of(name) is None or gram.tokens >= FEW_TOKENS:
            return gram
        self.few(name)
        names = same_of_every_expert(name, self.linears)
        if names[0] not in self._shared:
            shared = self._gram(name, self.exact is not None)
            self.collect(names, lambda _, x: shared.add(x, x if self.exact is not None else None))
            self._shared[names[0]] = shared
        return self._shared[names[0]]

    def _stop_at(self, stages: list[list[str]]) -> Iterator[RemovableHandle]:
        """Let batches stop at the first layer of each stage, in both streams."""
        for module in (self.module, self.exact):
            for at, names in enumerate(stages):
                if module is None:
                    break
                layer = module.get_submodule(names[0].removeprefix(self.prefix).removesuffix(".weight"))
                yield layer.register_forward_pre_hook(stop_here(at))

    def _set_out(self) -> list[tuple[Waiting, Waiting | None]]:
        """Every batch before its way through the block, and with it the same one in the unquantized stream."""
        pairs: list[tuple[Waiting, Waiting | None]] = []
        for start, stop in self.batches():
            twin = None
            if self.exact is not None and self.exact_inputs is not None and stop <= len(self.exact_inputs):
                twin = Waiting(2 * len(pairs) + 1, partial(_run, self, self.exact, self.exact_inputs, start, stop))
            pairs.append((Waiting(2 * len(pairs), partial(_run, self, self.module, self.inputs, start, stop)), twin))
        return pairs

    def _write_exact(self, start: int, out: torch.Tensor) -> None:
        assert self.exact_inputs is not None
        self.exact_inputs.write(start, out)

    def _common(self) -> set[int]:
        """Addresses of what all batches share: the arguments, the weights and the stores."""
        shared = [self.args, self.kwargs, self.inputs.kept]
        for module in (self.module, self.exact):
            shared += [*module.parameters(), *module.buffers()] if module is not None else []
        if self.exact_inputs is not None:
            shared.append(self.exact_inputs.kept)
        return {storage.data_ptr() for storage in storages_in(shared)}


def _add(gram: Gram, name: str, batch: Waiting, twin: Waiting | None, at: int, stride: int) -> None:
    """Add every `stride`th token that a batch and its twin in the unquantized stream hold at the place `at`."""
    if batch.at != at:
        return
    x = batch.x.reshape(-1, batch.x.shape[-1])
    other = None
    if twin is not None:
        # An expert is given other tokens in the two streams.
        alike = expert_of(name) is None and twin.at == at and twin.x.shape == batch.x.shape
        other = twin.x.reshape(x.shape) if alike else x
    gram.add(x[::stride], None if other is None else other[::stride])


def _run(block: Block, module: nn.Module, store: Activations, start: int, stop: int) -> torch.Tensor:
    return block.call(module, store.read(start, stop))


def walk(
    job: Job, *, exact: float = 0.0, ample: int = 0, restore: Restore = lambda _index, _prefix: None
) -> Iterator[Block]:
    """Yield the blocks in order, each with its weights; its outputs are computed when the next one is asked for.

    `exact` is the share of the calibration sequences, rounded up to whole batches, for which the unquantized blocks
    and their activations are kept beside the quantized ones. `ample` is the blocks'. `restore(index, prefix)` may
    return the finished values of a block from an earlier run, by parameter name: it is then passed through, not
    yielded.
    """
    source = job.source
    device = torch.device(job.device)
    skeleton = open_skeleton(source.config)
    ids, remark = draw(job)
    job.tell(remark)
    widest = max(columns for _, columns in skeleton.linears().values())
    twins = exact_sequences(exact, len(ids), ids.shape[1], widest)
    whole = (len(ids) + twins) / len(ids)

    def spill(size: int) -> Path | None:
        return job.folder / "activations.spill" if size * whole > job.spill_bytes else None

    inputs, arguments = enter(source, skeleton, torch.from_numpy(ids), device, spill)
    give_back_freed()
    room = job.spill_bytes - (int(inputs.nbytes * whole) if inputs.in_memory else 0)
    shelf = Shelf(job.folder / "waiting.spill", room)
    exact_inputs = None
    if twins:
        path = None if inputs.in_memory else job.folder / "exact.spill"
        exact_inputs = Activations(twins, *inputs.shape[1:], path)
        for start in range(twins):
            exact_inputs.write(start, inputs.read(start, start + 1))
    few = _few_teller(job, skeleton)
    step = job.progress.step(f"{job.recipe.method}: calibrating blocks", len(skeleton.blocks))
    with closing(inputs), closing(exact_inputs or inputs), closing(shelf), step as advance:
        for index, module in enumerate(skeleton.blocks):
            prefix = skeleton.block_prefix(index)
            meta = {name: parameter.data for name, parameter in module.named_parameters()}
            twin = copy.deepcopy(module) if twins else None
            finished = restore(index, prefix) or {}
            for name in meta:
                value = load(source, skeleton, prefix + name).to(device, DTYPE)
                if twin is not None:
                    set_parameter(twin, name, value)
                set_parameter(module, name, finished.get(prefix + name, value).to(device, DTYPE))
            module.to(device)  # its buffers
            if twin is not None:
                twin.to(device)
            linears = {
                name: skeleton.model.get_submodule(name.removesuffix(".weight"))
                for name in skeleton.linears()
                if name.startswith(prefix)
            }
            block = Block(
                index=index,
                prefix=prefix,
                module=module,
                inputs=inputs,
                args=arguments[index][0],
                kwargs=arguments[index][1],
                skeleton=skeleton,
                device=device,
                linears=linears,
                exact=twin,
                exact_inputs=exact_inputs,
                shelf=shelf,
                ample=ample,
                few=few,
            )
            if not finished:
                yield block
            if index + 1 < len(skeleton.blocks):
                block.finish()
            for name, data in meta.items():
                set_parameter(module, name, data)
            del block, twin, linears
            advance()
    give_back_freed()


def draw(job: Job) -> tuple[np.ndarray, str]:
    """The calibration's token ids (S, T) int64 and a remark on them, drawn once for each job."""
    if job.drawn is None:
        job.drawn = calibration_tokens(job.source.tokenizer(), job.recipe.calibration, job.recipe.seed)
    return job.drawn


def exact_sequences(share: float, sequences: int, length: int, widest: int) -> int:
    """How many of the sequences also go through the unquantized blocks: a share, in whole batches.

    But for a share of zero they hold `LEAST_TOKENS` for each of `widest` columns, or are all.
    """
    step = max(1, BATCH_TOKENS // length)
    wanted = max(share * sequences, LEAST_TOKENS * widest / length) if share else 0.0
    return min(sequences, math.ceil(wanted / step - 1e-9) * step)


def _few_teller(job: Job, skeleton: Skeleton) -> Callable[[str], None]:
    """Keep one note of the job up to date: how many experts saw too few tokens, those of earlier runs included."""
    every = {expert for name in skeleton.linears() if (expert := expert_of(name))}
    said = f" of {len(every)} experts saw fewer than {FEW_TOKENS} calibration tokens"
    earlier = sum(int(note.partition(" ")[0]) for note in job.notes if said in note)
    found: set[str] = set()

    def tell(name: str) -> None:
        found.add(str(expert_of(name)))
        job.notes[:] = [note for note in job.notes if said not in note]
        job.tell(
            f"{earlier + len(found)}{said}; they are calibrated on what all experts of their block saw. "
            "Give more or more varied text"
        )

    return tell


def importance(job: Job) -> dict[str, torch.Tensor]:
    """Mean squared input of every linear layer in the blocks: weight name -> (K,) float32."""
    found: dict[str, torch.Tensor] = {}
    for block in walk(job):
        stages = block.stages()
        sums: dict[str, torch.Tensor] = {}
        counts: dict[str, int] = {}

        def gather(name: str, x: torch.Tensor, sums: Any = sums, counts: Any = counts) -> None:
            sums[name] = sums.get(name, 0) + x.to(torch.float32).square().sum(0).cpu()
            counts[name] = counts.get(name, 0) + len(x)

        block.collect([names[0] for names in stages], gather)
        for names in stages:
            for name in names:
                found[name] = sums[names[0]] / counts[names[0]]
    return found
