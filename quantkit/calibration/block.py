"""A decoder block under calibration: statistics of its layers' inputs, and replacement of its weights."""

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
    """One decoder block of the quantized or unquantized model, with its input states (output states once `done`)."""

    index: int
    module: nn.Module
    states: Activations
    done: bool = False

    def call(self, sequences: Sequence[int], values: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return the block's output (B, T, D) for some sequences; `values` replace parameters by name."""
        device = next(self.module.parameters()).device
        hidden = self.states.select(sequences).to(device)
        return hidden_of(self.states.call(self.index, self.module, sequences, hidden, values))

    def finish(self, batches: list[tuple[int, int]], trimmer: MemoryTrimmer) -> None:
        if not self.done:
            with torch.no_grad():
                self.states.advance(self.index, self.module, batches, after_each=trimmer.trim)
        self.done = True

    def storages(self) -> set[int]:
        """Return the addresses of the storages that all batches share: arguments, weights and stores."""
        held: list[Any] = [*self.module.parameters(), *self.module.buffers(), self.states, *self.states.shared.stores()]
        held += self.states.arguments[self.index]
        return {storage.data_ptr() for storage in storages_in(held)}


class Block:
    """Decoder block `index` with its weights; `finish` turns its `inputs` into the next block's inputs.

    `exact`: the same block of the unquantized model with its own activations, for the first or all sequences; None if
    the walk has none. Batches that wait between two groups of layers use memory, beyond a limit `offload_file`.
    `input_scales`: by layer name, the (K,) divisors of the layer's inputs that the unquantized block does not have.
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
        """Return (start, stop) of each batch; the unquantized stream has all of a batch's sequences, or none."""
        return self.inputs.batches(self._batch_tokens, self._exact_count)

    @property
    def _exact_count(self) -> int:
        return 0 if self.exact is None else len(self.exact.states)

    def groups(self) -> list[list[str]]:
        """Return the names of the linear layers in execution order, grouped by shared input tensor."""
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
        """Call `gather(weight name, inputs (tokens, K))` for the named layers, batch by batch.

        `names` are in execution order. The block stops at the last named layer's input, or with `keep_outputs` runs to
        its end and writes the next block's inputs. `sequences`: use only the batches that contain the first `sequences`
        ones.
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
        """Return H = E[x x^T] over all calibration tokens, (K, K) float32, by the first layer name of each group.

        `gather`, `sequences`: as in `collect`. Raises SourceError if a layer's inputs are not finite.
        """
        grams = {names[0]: self.moments.empty(names[0]) for names in groups}

        def add(name: str, x: torch.Tensor) -> None:
            grams[name].add(x)
            gather(name, x)

        self.collect(list(grams), add, sequences=sequences)
        return {name: self.moments.group([name], gram, self.collect).hessian for name, gram in grams.items()}

    def for_each_group(self, visitor: Callable[[LinearGroup], None], *, keep_outputs: bool = True) -> None:
        """Pause the block before each group of layers, in execution order, and call `visitor` with its statistics.

        The visitor may replace the group's weights; the rest of the block then runs with the new weights ("true
        sequential" in GPTQ). `keep_outputs` writes the next block's inputs.
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
        """Add to `gram` a batch's inputs at stop `at`, paired with the unquantized block's inputs if they match."""
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
        """Run the rest of both streams, so that their states become the inputs of the next block."""
        self.stream.finish(self.batches(), self.trimmer)
        if self.exact is not None:
            self.targets()
            self.exact.states.shared.next_block()
        self.inputs.shared.next_block()

    def targets(self) -> Activations:
        """Return the outputs of the unquantized block; raises ValueError if the walk has no such block."""
        if self.exact is None:
            raise ValueError("this walk has no unquantized blocks")
        batches = [(start, stop) for start, stop in self.batches() if stop <= self._exact_count]
        self.exact.finish(batches, self.trimmer)
        return self.exact.states

    def distance(self, sequences: Sequence[int]) -> float:
        """Return the mean of |ours - exact|^2 / |exact|^2 over the output tokens of sequences in both streams."""
        exact = self.targets().select(sequences).to(self.device, torch.float32)
        with torch.no_grad():
            ours = self.inputs.select(sequences) if self.stream.done else self.stream.call(sequences)
        error = (ours.to(exact) - exact).square().sum(-1)
        return float((error / exact.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)).mean())

    def call_with(self, parameters: dict[str, torch.Tensor], sequences: Sequence[int]) -> torch.Tensor:
        """Return the outputs (B, T, D) of some sequences with some parameters replaced, by full name."""
        return self.stream.call(
            sequences, {name.removeprefix(self.prefix): value for name, value in parameters.items()}
        )

    def replace(self, name: str, value: torch.Tensor) -> None:
        """Replace a parameter, by full name; later statistics and later blocks use the new value."""
        set_parameter(self.module, name.removeprefix(self.prefix), value.to(self.device, DTYPE))
