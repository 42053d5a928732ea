"""Passes through a model's decoder blocks other than the calibration walk: embedding, forward and backward.

Embedding turns token ids into the first block's inputs and records the arguments of every block. Forward and backward
passes run the blocks one by one; the backward pass runs each block again to get gradients. Evaluation uses the
embedding and the forward pass for its windows of text, some thousand tokens at a time (`WindowWalk`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from quantkit.calibration.activations import DTYPE, Activations, Calls, Output, Shared, Traced, hidden_of, same_values
from quantkit.contracts.engine import BATCH_TOKENS, Window, alike
from quantkit.contracts.method import Job
from quantkit.errors import UnsupportedError
from quantkit.models.architectures import block_of, running
from quantkit.models.config import beside_states
from quantkit.models.skeleton import Skeleton, load_block, set_parameter, source_name
from quantkit.models.source import Source
from quantkit.models.stand_in import Recorder, StopForward, tables_by_rows
from quantkit.numerics.matmul import products_everywhere
from quantkit.system.files import temporary_folder
from quantkit.system.memory import MemoryTrimmer, trim_heap
from quantkit.system.progress import Progress

WAVE_TOKENS = 1 << 14  # tokens of windows that pass all blocks together


class Values(Protocol):
    """Reader of a model's parameters by their names in the skeleton."""

    def tensor(self, parameter: str) -> torch.Tensor:
        """Return a parameter outside the blocks, in its module's shape."""

    def rows(self, parameter: str, rows: list[int]) -> torch.Tensor:
        """Return the given rows of a parameter, (len(rows), ...), if possible without reading other rows."""


@dataclass(frozen=True)
class SourceValues:
    """Reader of a source's parameters by their names in the skeleton; see `Values`."""

    source: Source
    skeleton: Skeleton

    def tensor(self, parameter: str) -> torch.Tensor:
        return self.source.tensor(source_name(self.source, self.skeleton, parameter))

    def rows(self, parameter: str, rows: list[int]) -> torch.Tensor:
        name = source_name(self.source, self.skeleton, parameter)
        return torch.cat([self.source.rows(name, row, row + 1) for row in rows])


def embed(
    values: Values,
    skeleton: Skeleton,
    ids: torch.Tensor,
    device: torch.device,
    path: Path | None,
    room: float = 0,
    dtype: torch.dtype = DTYPE,
) -> Activations:
    """Embed token ids (S, T) as hidden states (S, T, D) in `dtype`, and record the arguments of each block.

    Of the token embeddings only the rows of occurring tokens are loaded. Values beyond `room` bytes go to files at
    `path`. Raises UnsupportedError if the blocks' arguments cannot be stored.
    """
    blocks, config, base = skeleton.blocks, skeleton.model.config, skeleton.model.base_model
    real_blocks = list(blocks)
    recorders = [Recorder(block, last=block is real_blocks[-1]) for block in real_blocks]
    prefix = f"{skeleton.model.base_model_prefix}."
    empty: list[tuple[str, nn.Parameter]] = []

    def rows(name: str, numbers: list[int]) -> torch.Tensor:
        return values.rows(prefix + name, numbers).to(device, dtype)

    def run(row: torch.Tensor) -> torch.Tensor:
        with suppress(StopForward), running(config, f"{type(base).__name__}, around its blocks"):
            base(input_ids=row[None], use_cache=False)
        return recorders[0].hidden

    try:
        for i, recorder in enumerate(recorders):
            blocks[i] = recorder
        with tables_by_rows(base, rows, ids.unique().tolist()) as by_rows, torch.no_grad():
            for name, parameter in list(base.named_parameters()):
                if name not in by_rows:
                    empty.append((name, parameter))
                    set_parameter(base, name, values.tensor(prefix + name).to(device, dtype))
            base.to(device)
            return _recorded(ids.to(device), run, recorders, skeleton, path, room, dtype)
    finally:
        for i, block in enumerate(real_blocks):
            blocks[i] = block
        for name, parameter in empty:
            # The parameter itself, not its value, so that a tied head stays tied.
            module, _, leaf = name.rpartition(".")
            base.get_submodule(module).register_parameter(leaf, parameter)


def _recorded(
    ids: torch.Tensor,
    run: Callable[[torch.Tensor], torch.Tensor],
    recorders: list[Recorder],
    skeleton: Skeleton,
    path: Path | None,
    room: float,
    dtype: torch.dtype,
) -> Activations:
    """Return activations with `run`'s hidden states for every row of `ids`, and with the blocks' arguments."""
    hidden = run(ids[0])
    if hidden.ndim not in (3, 4) or hidden.shape[-3] != 1:
        raise UnsupportedError(
            f"blocks of this architecture take hidden states of the shape {tuple(hidden.shape)}, but only "
            "(texts, tokens, width), or several of these, can be computed block by block"
        )
    if not all(same_values(recorder.hidden, hidden) for recorder in recorders):
        raise UnsupportedError(
            "this architecture changes hidden states between its blocks, so its blocks cannot be computed one by one"
        )
    length, width = hidden.shape[-2:]
    extra = beside_states(skeleton.model.config.get_text_config())
    size = len(ids) * (hidden.numel() + length * (extra.of_text + extra.shared)) * dtype.itemsize
    path = path if size > room else None
    store = Activations(len(ids), length, width, path, dtype, len(hidden) if hidden.ndim == 4 else 0)
    store.settings, store.held_bytes = skeleton.model.config, 0 if path else size
    calls = Calls(len(ids), path)
    store.of_text = calls.of_text
    try:
        for i, row in enumerate(ids):
            store.write(i, run(row) if i else hidden)
            calls.add(i, recorders)
        if calls.of_text:
            for recorder in recorders:
                recorder.shift = 1.0
            run(ids[0])
            calls.refuse_following(recorders)
    except BaseException:
        store.close()
        raise
    store.arguments = calls.arguments()
    return store


class Passes:
    """Forward and backward passes through the blocks, with one block's weights and one batch in memory.

    `as_tuple`: whether the last block that ran returned a tuple. `tokens`: size of a batch.
    """

    def __init__(self, job: Job, tokens: int) -> None:
        self.as_tuple = False
        self.device = torch.device(job.device)
        self._job, self._tokens = job, tokens
        self._slopes = Shared(0, None)  # gradients of shared values in the current backward pass

    def block(
        self, index: int, instead: Callable[[str], torch.Tensor | None] = lambda _name: None
    ) -> AbstractContextManager[nn.Module]:
        """Return a context that loads block `index`; `instead(full name)` may return a value to use for a parameter."""
        return load_block(self._job.source, self._job.skeleton, index, self.device, DTYPE, instead)

    def forward(self, index: int, inputs: Activations, outputs: Activations) -> None:
        """Run block `index`, whose weights are loaded, on `inputs`; `outputs` may be the same object."""
        with torch.no_grad():
            block, batches = self._job.skeleton.blocks[index], inputs.batches(self._tokens)
            self.as_tuple = isinstance(inputs.advance(index, block, batches, outputs), tuple)
        inputs.shared.next_block()
        outputs.shared = inputs.shared

    def backward(
        self, index: int, inputs: Activations, slopes: Activations, others: Iterable[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Backpropagate through block `index`: gradients w.r.t. its outputs, `slopes`, become those w.r.t. its inputs.

        The block runs again for this; call the last block first. Gradients w.r.t. shared values go to the block that
        wrote the values. Yields each batch's gradients w.r.t. `others`, which may be filled while the batch runs.
        """
        if index + 1 == len(inputs.arguments):
            self._slopes = Shared(len(inputs), inputs.path)
        for start, stop in inputs.batches(self._tokens):
            traced, batch = Traced(), range(start, stop)
            hidden = inputs.read(start, stop).to(self.device).detach().requires_grad_()
            block = self._job.skeleton.blocks[index]
            with torch.enable_grad():
                out = hidden_of(inputs.call(index, block, batch, hidden, traced=traced))
            ends, given = [out], [slopes.read(start, stop).to(self.device)]
            for key, made in traced.made.items():
                if key in self._slopes.keys(key[0]):  # later blocks used it
                    ends += made
                    slopes_of_made = self._slopes.read(key, batch)
                    given += [slope.to(value) for slope, value in zip(slopes_of_made, made, strict=True)]
            taken = [value for values in traced.taken.values() for value in values]
            with running(inputs.settings, block_of(index, block)):
                inner, *gradients = torch.autograd.grad(ends, [hidden, *taken, *others], given)
            slopes.write(start, inner)
            by_taken = iter(gradients)
            for key, values in traced.taken.items():
                self._slopes.add(key, batch, tuple(next(by_taken) for _ in values))
            yield tuple(by_taken)
        if index == 0:
            self._slopes.close()


@dataclass(frozen=True)
class WindowWalk:
    """Forward pass of windows of text, with one block's weights in memory at a time.

    `block(index)` returns a context with the block's weights. Hidden states are in `dtype`; above `offload_bytes` they
    are in a file in the system's temporary folder.
    """

    skeleton: Skeleton
    values: Values
    block: Callable[[int], AbstractContextManager[nn.Module]]
    device: torch.device
    dtype: torch.dtype
    offload_bytes: int
    progress: Progress

    def outputs(self, windows: Sequence[Window]) -> Iterator[tuple[list[Window], Output]]:
        """Yield (windows of a batch, the last block's return value) in order; hidden states are (B, T, D).

        Models with several hidden states per token give (states, B, T, D). Raises UnsupportedError if the model's
        blocks cannot be computed one by one.
        """
        for number, wave in enumerate(_waves(windows), 1):
            with ExitStack() as stack:
                runs = self._embedded(wave, stack)
                as_tuple = self._through([store for _, store in runs], number)
                for same, store in runs:
                    for start, stop in store.batches(BATCH_TOKENS):
                        hidden = store.read(start, stop).to(self.device)
                        yield same[start:stop], (hidden,) if as_tuple else hidden

    def _embedded(self, wave: list[Window], stack: ExitStack) -> list[tuple[list[Window], Activations]]:
        settings = self.skeleton.model.config.get_text_config()
        extra = beside_states(settings)
        each = int(settings.hidden_size) * extra.states + extra.of_text + extra.shared
        size = sum(len(window.ids) for window in wave) * each * self.dtype.itemsize
        folder = stack.enter_context(temporary_folder()) if size > self.offload_bytes else None
        runs: list[tuple[list[Window], Activations]] = []
        for _, group in groupby(wave, lambda window: len(window.ids)):
            same = list(group)
            ids = torch.stack([torch.from_numpy(window.ids) for window in same])
            path = None if folder is None else folder / f"{len(runs)}.offload"
            with torch.inference_mode(), products_everywhere():
                store = embed(self.values, self.skeleton, ids, self.device, path, dtype=self.dtype)
            runs.append((same, stack.enter_context(closing(store))))
        trim_heap()
        return runs

    def _through(self, stores: list[Activations], number: int) -> bool:
        """Run all blocks on the activations `stores` of wave `number`; return whether the last block returns tuples."""
        blocks = len(self.skeleton.blocks)
        count = sum(len(store.batches(BATCH_TOKENS)) for store in stores)
        out: Output = ()
        with self.progress.step(f"blocks, windows in wave {number}", blocks * count, work=True) as advance:
            trimmer = MemoryTrimmer()

            def after_each() -> None:
                trimmer.trim()
                advance()

            for index in range(blocks):
                with self.block(index) as module:
                    for store in stores:
                        batches = store.batches(BATCH_TOKENS)
                        with torch.inference_mode(), products_everywhere():
                            out = store.advance(index, module, batches, after_each=after_each)
                        store.shared.next_block()
                del module
        return isinstance(out, tuple)


def _waves(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Yield groups of whole batches with at most `WAVE_TOKENS` tokens, or one batch."""
    wave: list[Window] = []
    tokens = 0
    for batch in alike(windows):
        size = sum(len(window.ids) for window in batch)
        if wave and tokens + size > WAVE_TOKENS:
            yield wave
            wave, tokens = [], 0
        wave += batch
        tokens += size
    if wave:
        yield wave
