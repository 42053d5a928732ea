"""A decoder block under calibration: its activations, and its weights, which methods replace one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from quantkit.calibration.activations import DTYPE, Activations, hidden_of
from quantkit.calibration.moments import Gather, LinearGroup, Moments
from quantkit.calibration.suspended import PAST, Batch, Batches, OffloadFile, storages_in
from quantkit.models.skeleton import set_parameter
from quantkit.models.stand_in import StopForward
from quantkit.models.unfuse import expert_of
from quantkit.numerics.second_moments import Gram
from quantkit.system.memory import MemoryTrimmer


@dataclass
class Stream:
    """A block of the quantized or unquantized model, with its input states, or its output states once `done`."""

    index: int
    module: nn.Module
    states: Activations
    done: bool = False

    def call(self, sequences: Sequence[int], values: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return the block's output (B, T, D) for some sequences; `values` may replace parameters."""
        device = next(self.module.parameters()).device
        hidden = self.states.select(sequences).to(device)
        return hidden_of(self.states.call(self.index, self.module, sequences, hidden, values))

    def finish(self, batches: list[tuple[int, int]], trimmer: MemoryTrimmer) -> None:
        if not self.done:
            with torch.no_grad():
                self.states.advance(self.index, self.module, batches, after_each=trimmer.trim)
        self.done = True

    def storages(self) -> set[int]:
        """Return the addresses of storages that all batches share: arguments, weights and stores."""
        held: list[Any] = [*self.module.parameters(), *self.module.buffers(), self.states, *self.states.shared.stores()]
        held += self.states.arguments[self.index]
        return {storage.data_ptr() for storage in storages_in(held)}


class Block:
    """A decoder block, number `index`, with real weights; its `inputs` become those of the next block.

    `exact`: the stream of the unquantized model for the first or all sequences, if the walk has one. Between
    two groups of layers, batches wait in memory, or beyond a limit in `offload_file`.
    `input_scales`: by layer, the (K,) divisors of inputs here, unlike in the unquantized block.
    """

    def __init__(
        self,
        prefix: str,
        stream: Stream,
        exact: Stream | None,
        moments: Moments,
        offload_file: OffloadFile,
        batch_tokens: int,
        trimmer: MemoryTrimmer,
    ) -> None:
        self.index, self.module, self.inputs = stream.index, stream.module, stream.states
        self.prefix, self.stream, self.exact, self.moments = prefix, stream, exact, moments
        self.linears, self.device, self.shards = moments.linears, moments.device, moments.shards
        self.trimmer, self._offload_file, self._batch_tokens = trimmer, offload_file, batch_tokens
        self.input_scales: dict[str, torch.Tensor] = {}

    def batches(self) -> list[tuple[int, int]]:
        """Return the bounds of batches; all sequences of a batch also go through the unquantized block, or
        none do."""
        return self.inputs.batches(self._batch_tokens, self._exact_count)

    @property
    def _exact_count(self) -> int:
        return 0 if self.exact is None else len(self.exact.states)

    def groups(self) -> list[list[str]]:
        """Return linear layers in execution order; layers with the same input are grouped."""
        seen: list[tuple[torch.Tensor, list[str]]] = []

        def note(name: str, x: torch.Tensor) -> None:
            for tensor, names in seen:
                if tensor is x:
                    names.append(name)
                    return
            seen.append((x, [name]))

        with ExitStack() as stack, torch.no_grad():
            for name in self.linears:
                self._watch(stack, name, note)
            self.stream.call(range(1))
        return [names for _, names in seen]

    def collect(
        self, names: list[str], gather: Gather, *, keep_outputs: bool = False, sequences: int | None = None
    ) -> None:
        """Pass (weight name, inputs (tokens, K)) of the named layers to `gather`, batch by batch.

        `names` are in execution order. The block runs only up to the last layer's input, or with
        `keep_outputs` to its end, which prepares the next block's inputs. With `sequences` it runs only over the
        batches of the first `sequences` sequences.
        """

        def see(name: str, x: torch.Tensor) -> None:
            gather(name, x.reshape(-1, x.shape[-1]))
            if name == names[-1] and not keep_outputs:
                raise StopForward

        with ExitStack() as stack, torch.no_grad():
            for name in names:
                self._watch(stack, name, see)
            for start, stop in self.batches():
                if sequences is not None and start >= sequences:
                    break
                with suppress(StopForward):
                    out = self.stream.call(range(start, stop))
                    if keep_outputs:
                        self.inputs.write(start, out)
                self.trimmer.trim()
        self.stream.done = keep_outputs

    def _watch(self, stack: ExitStack, name: str, see: Callable[[str, torch.Tensor], None]) -> None:
        layer = self.linears[name]
        stack.enter_context(layer.register_forward_pre_hook(lambda _module, args: see(name, args[0])))

    def hessians(
        self, groups: list[list[str]], gather: Gather = lambda _name, _x: None, sequences: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Return H = mean of x x^T over all calibration tokens, (K, K) float32, by the first name of each group.

        `gather` and `sequences`: see `collect`. Raises SourceError if a layer's inputs are not finite.
        """
        grams = {names[0]: self.moments.empty(names[0]) for names in groups}

        def add(name: str, x: torch.Tensor) -> None:
            grams[name].add(x)
            gather(name, x)

        self.collect(list(grams), add, sequences=sequences)
        return {name: self.moments.group([name], gram, self.collect).hessian for name, gram in grams.items()}

    def for_each_group(self, visitor: Callable[[LinearGroup], None], *, keep_outputs: bool = True) -> None:
        """Stop before each group of the block, in execution order, and pass its statistics to `visitor`.

        The visitor may replace the group's weights; the rest of the block then runs with the new ones (true
        sequential). `keep_outputs` prepares the next block's inputs.
        """
        groups, full = self.groups(), self.exact
        streams = [self.stream] if full is None else [self.stream, full]
        batches = Batches(self._offload_file, set().union(*(stream.storages() for stream in streams)))
        pairs: list[tuple[int, Batch, Batch | None]] = []
        for start, stop in self.batches():
            batch, exact = batches.add(partial(self.stream.call, range(start, stop))), None
            if full is not None and stop <= self._exact_count:
                exact = batches.add(partial(full.call, range(start, stop)))
            pairs.append((start, batch, exact))
        with ExitStack() as stack, torch.no_grad():
            stack.callback(batches.close)
            for stream in streams:
                for at, names in enumerate(groups):
                    layer = stream.module.get_submodule(names[0].removeprefix(self.prefix).removesuffix(".weight"))
                    stack.enter_context(layer.register_forward_pre_hook(batches.stop_at(at)))
            for at, names in enumerate(groups):
                gram = self.moments.empty(names[0], full is not None)
                for start, batch, exact in pairs:
                    batch.go_to(at)
                    if exact is not None:
                        exact.go_to(at)
                    self._add(gram, names[0], batch, exact, at)
                    if full is not None and exact is not None and at + 1 == len(groups):
                        # The unquantized block is no longer needed.
                        exact.go_to(PAST)
                        full.states.write(start, exact.take())
                    batch.wait()
                    if exact is not None:
                        exact.wait()
                    self.trimmer.trim()
                group = self.moments.group(names, gram, self.collect)
                del gram, batch, exact
                self.trimmer.trim()
                visitor(group)
                del group
            if full is not None:
                full.done = True
            for start, batch, _ in pairs if keep_outputs else ():
                batch.go_to(PAST)
                self.inputs.write(start, batch.take())
                self.trimmer.trim()
            self.stream.done = keep_outputs

    def _add(self, gram: Gram, name: str, batch: Batch, exact: Batch | None, at: int) -> None:
        """Add the inputs at the place `at` of a batch, and of the same batch in the unquantized stream."""
        if batch.at != at:
            return
        x = batch.x.reshape(-1, batch.x.shape[-1])
        other = None
        if exact is not None:
            # An expert may get different tokens in the two streams.
            alike = expert_of(name) is None and exact.at == at and exact.x.shape == batch.x.shape
            other = exact.x.reshape(x.shape) if alike else x
            if alike and name in self.input_scales:
                other = other / self.input_scales[name]
        stride = self.moments.stride(name)
        gram.add(x[::stride], None if other is None else other[::stride])

    def finish(self) -> None:
        """Turn the inputs of this block into those of the next one, in both streams."""
        self.stream.finish(self.batches(), self.trimmer)
        if self.exact is not None:
            self.targets()
            self.exact.states.shared.next_block()
        self.inputs.shared.next_block()

    def targets(self) -> Activations:
        """Return the outputs of the unquantized block, which are the next one's inputs."""
        if self.exact is None:
            raise ValueError("this walk has no unquantized blocks")
        batches = [(start, stop) for start, stop in self.batches() if stop <= self._exact_count]
        self.exact.finish(batches, self.trimmer)
        return self.exact.states

    def distance(self, sequences: Sequence[int]) -> float:
        """How far this block's outputs are from the unquantized one's: the mean over the tokens of |ours - exact|^2 /
        |exact|^2, of sequences that are in both streams."""
        exact = self.targets().select(sequences).to(self.device, torch.float32)
        with torch.no_grad():
            ours = self.inputs.select(sequences) if self.stream.done else self.stream.call(sequences)
        error = (ours.to(exact) - exact).square().sum(-1)
        return float((error / exact.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)).mean())

    def call_with(self, parameters: dict[str, torch.Tensor], sequences: Sequence[int]) -> torch.Tensor:
        """Return the outputs (B, T, D) of some sequences, with `parameters` (by full name) replaced."""
        return self.stream.call(
            sequences, {name.removeprefix(self.prefix): value for name, value in parameters.items()}
        )

    def replace(self, name: str, value: torch.Tensor) -> None:
        """Replace a parameter; later statistics and blocks use it."""
        set_parameter(self.module, name.removeprefix(self.prefix), value.to(self.device, DTYPE))
