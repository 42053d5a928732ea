"""A decoder block under calibration: its weights, what flows into it, and the statistics of its layers' inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from quantkit.calibration.activations import DTYPE, Activations
from quantkit.calibration.flow.calls import call_block, hidden_of
from quantkit.calibration.suspended import (
    PAST,
    Batch,
    Batches,
    OffloadFile,
    RepeatedBatches,
    SuspendedBatches,
    storages_in,
)
from quantkit.contracts.method import BATCH_TOKENS
from quantkit.errors import SourceError
from quantkit.models.architectures import block_of, running
from quantkit.models.skeleton import Skeleton, set_parameter
from quantkit.models.stand_in import Arguments, StopForward
from quantkit.models.unfuse import expert_of, same_of_every_expert
from quantkit.numerics.second_moments import Gram
from quantkit.system.memory import MemoryTrimmer
from quantkit.system.ranks.group import size, sum_over

FEW_TOKENS = 128  # an expert that saw fewer is calibrated on what all experts of its block saw


def batch_size(length: int) -> int:
    """How many sequences of `length` tokens are one share of the work: of ranks, and of the unquantized stream."""
    return max(1, BATCH_TOKENS // length)


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers `names` that get the same input: its H = E[x x^T] (K, K) float32.

    cross is E[(exact - x) x^T] (K, K) float32, exact being the input in the unquantized model, or None. Where it is
    known for some inputs only, `paired` is the E[x x^T] of those.
    """

    names: list[str]
    hessian: torch.Tensor
    cross: torch.Tensor | None = None
    paired: torch.Tensor | None = None


@dataclass(frozen=True)
class FullPrecisionBlock:
    """The unquantized block beside a block, and what flows into it: the first sequences, or all of them."""

    module: nn.Module
    inputs: Activations


@dataclass
class Block:
    """Block `index` with real weights. `linears` are its linear layers by full weight name.

    `full_precision_block` is there where the walk keeps it. Between two groups of layers, batches wait in memory or,
    where they hold more than the room of `offload_file`, there; without `suspend` they run the block again for each
    group. Where twice `ample` tokens a column have come to a layer that is no expert, `for_each_group` takes every
    second one (0: always all).
    Statistics are those of all ranks, `all_tokens` what they have together (0: what is here).
    `input_scales` are the (K,) by which inputs of layers are divided here and not in the unquantized block, by name.
    `few` is told each layer of an expert that saw too few tokens; `tokens` counts those of the latest `hessians`;
    `trimmer` is the walk's.
    """

    index: int
    prefix: str
    module: nn.Module
    inputs: Activations
    arguments: Arguments
    skeleton: Skeleton
    device: torch.device
    offload_file: OffloadFile
    batch_tokens: int = BATCH_TOKENS
    suspend: bool = True
    ample: int = 0
    all_tokens: int = 0
    linears: dict[str, nn.Linear] = field(default_factory=dict)
    full_precision_block: FullPrecisionBlock | None = None
    input_scales: dict[str, torch.Tensor] = field(default_factory=dict)
    few: Callable[[str], None] = lambda _name: None
    tokens: dict[str, int] = field(default_factory=dict)
    trimmer: MemoryTrimmer = field(default_factory=MemoryTrimmer)
    _shared: dict[str, Gram] = field(default_factory=dict)
    _done: bool = False
    _targets_done: bool = False

    def batches(self) -> list[tuple[int, int]]:
        """Bounds of the sequences that go through the block together: all of them also through the unquantized one, or
        none."""
        full = self.full_precision_block
        return self.inputs.batches(self.batch_tokens, 0 if full is None else len(full.inputs))

    def call(self, module: Callable[..., Any], inputs: Activations, sequences: Sequence[int]) -> torch.Tensor:
        """(B, T, D): what some sequences of `inputs` become in `module`, the block or another with its arguments."""
        hidden = inputs.select(sequences).to(self.device)
        with running(self.skeleton.model.config, block_of(self.index, self.module)):
            return hidden_of(call_block(module, self.arguments, hidden, inputs, sequences))

    def forward(
        self, receive: Callable[[int, torch.Tensor], None] = lambda _start, _out: None, sequences: int | None = None
    ) -> None:
        """Run the block over all calibration inputs, handing (first sequence, outputs) of each batch to `receive`.

        With `sequences` only the batches that hold the first so many.
        """
        with torch.no_grad():
            for start, stop in self.batches():
                if sequences is not None and start >= sequences:
                    break
                with suppress(StopForward):
                    receive(start, self.call(self.module, self.inputs, range(start, stop)))
                self.trimmer.trim()

    def groups(self) -> list[list[str]]:
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

        with ExitStack() as stack, torch.no_grad():
            for name, module in self.linears.items():
                stack.enter_context(module.register_forward_pre_hook(note(name)))
            self.call(self.module, self.inputs, range(1))
        return [names for _, names in seen]

    def collect(
        self,
        names: list[str],
        gather: Callable[[str, torch.Tensor], None],
        *,
        keep_outputs: bool = False,
        sequences: int | None = None,
    ) -> None:
        """Hand (weight name, inputs (tokens, K)) of the named layers to `gather`, batch by batch.

        `names` are in the order of execution. The block runs only as far as the last one's input, or with
        `keep_outputs` to its end: the next block's inputs are ready then. `sequences` is that of `forward`.
        """
        with ExitStack() as stack:
            for name in names:

                def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                    gather(name, args[0].reshape(-1, args[0].shape[-1]))
                    if name == names[-1] and not keep_outputs:
                        raise StopForward

                stack.enter_context(self.linears[name].register_forward_pre_hook(hook))
            self.forward(self.inputs.write if keep_outputs else lambda _start, _out: None, sequences)
        self._done = keep_outputs

    def hessians(
        self,
        groups: list[list[str]],
        gather: Callable[[str, torch.Tensor], None] = lambda _name, _x: None,
        sequences: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """H = mean of x x^T over all calibration tokens, (K, K) float32, for each group under its first name.

        `gather` is handed what `collect` hands on, `sequences` is that of `forward`. Raises SourceError where the
        inputs of a layer are not finite.
        """
        grams = {names[0]: self._gram(names[0]) for names in groups}

        def add(name: str, x: torch.Tensor) -> None:
            grams[name].add(x)
            gather(name, x)

        self.collect(list(grams), add, sequences=sequences)
        for gram in grams.values():
            _join(gram)
        self.tokens = {name: gram.tokens for name, gram in grams.items()}
        return {name: self._group([name], gram).hessian for name, gram in grams.items()}

    def for_each_group(self, visitor: Callable[[LinearGroup], None], *, keep_outputs: bool = True) -> None:
        """Stop before each group of the block, in the order of execution, and hand its statistics to `visitor`.

        The visitor may replace the group's weights; what follows in the block then runs with the new ones (true
        sequential). With `keep_outputs` the next block's inputs are ready afterwards.
        """
        groups, full = self.groups(), self.full_precision_block
        batches = SuspendedBatches(self.offload_file, self._common()) if self.suspend else RepeatedBatches()
        pairs = self._set_out(batches)
        with ExitStack() as stack, torch.no_grad():
            stack.callback(batches.close)
            for module in self._modules():
                for at, names in enumerate(groups):
                    layer = module.get_submodule(names[0].removeprefix(self.prefix).removesuffix(".weight"))
                    stack.enter_context(layer.register_forward_pre_hook(batches.stop_at(at)))
            for at, names in enumerate(groups):
                gram, stride = self._gram(names[0], full is not None), self._stride(names[0])
                for start, batch, exact in pairs:
                    batch.go_to(at)
                    if exact is not None:
                        exact.go_to(at)
                    _add(gram, names[0], batch, exact, at, stride, self.input_scales.get(names[0]))
                    if at + 1 == len(groups) and exact is not None and full is not None:
                        # Nothing waits for the unquantized block any more.
                        exact.go_to(PAST)
                        full.inputs.write(start, exact.take())
                    batch.wait()
                    if exact is not None:
                        exact.wait()
                    self.trimmer.trim()
                _join(gram)
                group = self._group(names, gram)
                del gram, batch, exact
                self.trimmer.trim()
                visitor(group)
                del group
            self._targets_done = True
            for start, batch, _ in pairs if keep_outputs else ():
                batch.go_to(PAST)
                self.inputs.write(start, batch.take())
                self.trimmer.trim()
            self._done = keep_outputs

    def finish(self) -> None:
        """Turn the inputs of this block into those of the next one, in both streams."""
        if not self._done:
            self.forward(self.inputs.write)
            if self.full_precision_block is not None:
                self.targets()
        self._done = True
        self.inputs.shared.next_block()
        if self.full_precision_block is not None:
            self.full_precision_block.inputs.shared.next_block()

    def targets(self) -> Activations:
        """The outputs of the unquantized block, which are its stream's inputs of the next one."""
        exact = self.full_precision_block
        if exact is None:
            raise ValueError("this walk keeps no unquantized blocks")
        if not self._targets_done:
            with torch.no_grad():
                for start, stop in self.batches():
                    if stop <= len(exact.inputs):
                        exact.inputs.write(start, self.call(exact.module, exact.inputs, range(start, stop)))
        self._targets_done = True
        return exact.inputs

    def distance(self, sequences: Sequence[int]) -> float:
        """How far this block's outputs are from the unquantized one's: the mean over the tokens of |ours - exact|^2 /
        |exact|^2, of sequences that are in both streams."""
        exact = self.targets().select(sequences).to(self.device, torch.float32)
        with torch.no_grad():
            ours = self.inputs.select(sequences) if self._done else self.call(self.module, self.inputs, sequences)
        error = (ours.to(exact) - exact).square().sum(-1)
        return float((error / exact.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)).mean())

    def call_with(self, parameters: dict[str, torch.Tensor], sequences: Sequence[int]) -> torch.Tensor:
        """(B, T, D): the outputs of some sequences with other values of some parameters, given by full name."""
        named = {name.removeprefix(self.prefix): value for name, value in parameters.items()}

        def module(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self.module, named, args, kwargs)

        return self.call(module, self.inputs, sequences)

    def replace(self, name: str, value: torch.Tensor) -> None:
        """Put another parameter in place; later statistics and blocks see it."""
        set_parameter(self.module, name.removeprefix(self.prefix), value.to(self.device, DTYPE))

    def _stride(self, name: str) -> int:
        sequences, length, _ = self.inputs.shape
        enough = 2 * self.ample * self.linears[name].in_features
        tokens = self.all_tokens or sequences * length
        return 2 if self.ample and expert_of(name) is None and tokens >= enough else 1

    def _gram(self, name: str, cross: bool = False) -> Gram:
        return Gram(self.linears[name].in_features, self.device, cross)

    def _group(self, names: list[str], gram: Gram) -> LinearGroup:
        enough = self._enough(names[0], gram)
        shared = enough is not gram
        hessian = enough.mean(shared)
        if not bool(torch.isfinite(hessian).all()):
            raise SourceError(f"the inputs of {names[0]} are not finite on the calibration text; the model overflows")
        return LinearGroup(names, hessian, enough.cross(shared), enough.paired(shared))

    def _enough(self, name: str, gram: Gram) -> Gram:
        """The statistics of a layer or, for an expert that saw too few tokens, those of all experts of its block."""
        if expert_of(name) is None or gram.tokens >= FEW_TOKENS:
            return gram
        self.few(name)
        names = same_of_every_expert(name, self.linears)
        if names[0] not in self._shared:
            cross = self.full_precision_block is not None
            shared = self._gram(name, cross)
            self.collect(names, lambda _, x: shared.add(x, x if cross else None))
            _join(shared)
            self._shared[names[0]] = shared
        return self._shared[names[0]]

    def _set_out(self, batches: Batches) -> list[tuple[int, Batch, Batch | None]]:
        """Every batch before its way through the block, with its first sequence and the same batch in the unquantized
        stream."""
        pairs: list[tuple[int, Batch, Batch | None]] = []
        full = self.full_precision_block
        for start, stop in self.batches():
            batch, exact = batches.add(partial(_run, self, self.module, self.inputs, start, stop)), None
            if full is not None and stop <= len(full.inputs):
                exact = batches.add(partial(_run, self, full.module, full.inputs, start, stop))
            pairs.append((start, batch, exact))
        return pairs

    def _modules(self) -> list[nn.Module]:
        full = self.full_precision_block
        return [self.module] if full is None else [self.module, full.module]

    def _common(self) -> set[int]:
        """Addresses of what all batches share: the arguments, the weights and the stores."""
        shared: list[Any] = [*self.arguments, self.inputs, *self.inputs.shared.stores()]
        for module in self._modules():
            shared += [*module.parameters(), *module.buffers()]
        if self.full_precision_block is not None:
            exact = self.full_precision_block.inputs
            shared += [exact, *exact.shared.stores()]
        return {storage.data_ptr() for storage in storages_in(shared)}


def _add(
    gram: Gram, name: str, batch: Batch, exact: Batch | None, at: int, stride: int, scale: torch.Tensor | None
) -> None:
    """Add every `stride`th token that a batch and the same one in the unquantized stream hold at the place `at`.

    What the second holds is divided by `scale` (K,) where that is given.
    """
    if batch.at != at:
        return
    x = batch.x.reshape(-1, batch.x.shape[-1])
    other = None
    if exact is not None:
        # An expert is given other tokens in the two streams.
        alike = expert_of(name) is None and exact.at == at and exact.x.shape == batch.x.shape
        other = exact.x.reshape(x.shape) if alike else x
        if alike and scale is not None:
            other = other / scale
    gram.add(x[::stride], None if other is None else other[::stride])


def _join(gram: Gram) -> None:
    if size() > 1:
        gram.join(sum_over)


def _run(block: Block, module: nn.Module, store: Activations, start: int, stop: int) -> torch.Tensor:
    return block.call(module, store, range(start, stop))
