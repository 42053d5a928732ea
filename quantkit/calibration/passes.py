"""Ways through a model's decoder blocks beside the walk: in, through, and back.

In: token ids become the first block's inputs, with the arguments of every block. Through and back: blocks run one by
one on what flows into them, and once more for gradients. Windows of text that are evaluated go in and through, too,
some thousand tokens at a time.
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

from quantkit.calibration.activations import DTYPE, Activations, Calls, Output, hidden_of, same_values
from quantkit.calibration.stores import Shared, Traced
from quantkit.contracts.method import Job
from quantkit.contracts.windows import BATCH_TOKENS, Window, alike
from quantkit.errors import UnsupportedError
from quantkit.models.architectures.foreign import block_of, running
from quantkit.models.config import beside_states
from quantkit.models.skeleton import Skeleton, load_block, set_parameter, source_name
from quantkit.models.source import Source
from quantkit.models.stand_in import Arguments, Recorder, StopForward, tables_by_rows
from quantkit.numerics.matmul import products_everywhere
from quantkit.progress import Progress
from quantkit.system.memory import MemoryTrimmer, trim_heap
from quantkit.system.temporary import temporary_folder

WAVE_TOKENS = 1 << 14  # of windows that go through all blocks before others do


class Values(Protocol):
    """A model's values by the names of its skeleton's parameters, wherever they come from."""

    def tensor(self, parameter: str) -> torch.Tensor:
        """A parameter outside the blocks, in its shape."""

    def rows(self, parameter: str, rows: list[int]) -> torch.Tensor:
        """Some of its rows, (len(rows), ...), without the others where that can be."""


@dataclass(frozen=True)
class SourceValues:
    """The values of a source."""

    source: Source
    skeleton: Skeleton

    def tensor(self, parameter: str) -> torch.Tensor:
        return self.source.tensor(source_name(self.source, self.skeleton, parameter))

    def rows(self, parameter: str, rows: list[int]) -> torch.Tensor:
        return self.source.select_rows(source_name(self.source, self.skeleton, parameter), rows)


def embed(
    values: Values,
    skeleton: Skeleton,
    ids: torch.Tensor,
    device: torch.device,
    offload: Callable[[int], Path | None],
    dtype: torch.dtype = DTYPE,
) -> Activations:
    """Embed (S, T) ids -> hidden states (S, T, D) in `dtype`, with the arguments of each block.

    Of token embeddings only the rows of tokens that occur are loaded. `offload` tells the file for so many bytes of
    hidden states and of what goes with them, or None to keep them in memory. Raises UnsupportedError where what blocks
    are called with cannot be kept.
    """
    blocks, config = skeleton.blocks, skeleton.model.config
    real_blocks = list(blocks)
    recorders = [Recorder(block, last=block is real_blocks[-1]) for block in real_blocks]
    base = skeleton.model.base_model
    prefix = f"{skeleton.model.base_model_prefix}."
    empty: list[tuple[str, nn.Parameter]] = []
    with ExitStack() as undo:
        undo.callback(_put_back, skeleton, real_blocks, empty)
        for i, recorder in enumerate(recorders):
            blocks[i] = recorder

        def rows(name: str, numbers: list[int]) -> torch.Tensor:
            return values.rows(prefix + name, numbers).to(device, dtype)

        def run(row: torch.Tensor) -> torch.Tensor:
            with suppress(StopForward), running(config, f"{type(base).__name__}, around its blocks"):
                base(input_ids=row[None], use_cache=False)
            return recorders[0].hidden

        by_rows = undo.enter_context(tables_by_rows(base, rows, ids.unique().tolist()))
        undo.enter_context(torch.no_grad())
        for name, parameter in list(base.named_parameters()):
            if name not in by_rows:
                empty.append((name, parameter))
                set_parameter(base, name, values.tensor(prefix + name).to(device, dtype))
        base.to(device)
        ids = ids.to(device)
        store = _store_for(skeleton, run(ids[0]), len(ids), offload, dtype)
        try:
            store.arguments = _recorded(store, ids, run, recorders)
        except BaseException:
            store.close()
            raise
    store.settings = config
    return store


def _recorded(
    store: Activations, ids: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor], recorders: list[Recorder]
) -> list[Arguments]:
    """Put what `run` makes of each row of ids (the first one has been run) into the store; the blocks' arguments."""
    if not all(same_values(recorder.hidden, recorders[0].hidden) for recorder in recorders):
        raise UnsupportedError(
            "this architecture changes hidden states between its blocks, so they cannot be computed one by one"
        )
    calls = Calls(len(ids), store.path)
    store.of_text = calls.stores
    for i, row in enumerate(ids):
        store.write(i, run(row) if i else recorders[0].hidden)
        calls.add(i, recorders)
    if calls.stores:
        for recorder in recorders:
            recorder.shift = 1.0
        run(ids[0])
        calls.refuse_following(recorders)
    return calls.arguments()


def _put_back(skeleton: Skeleton, blocks: list[nn.Module], empty: list[tuple[str, nn.Parameter]]) -> None:
    """Give the skeleton its blocks and its parameters without values again."""
    for i, block in enumerate(blocks):
        skeleton.blocks[i] = block
    for name, parameter in empty:
        # The parameter itself, not its value: a head that is tied to the embedding stays so.
        path, _, leaf = name.rpartition(".")
        skeleton.model.base_model.get_submodule(path).register_parameter(leaf, parameter)


def _store_for(
    skeleton: Skeleton,
    hidden: torch.Tensor,
    count: int,
    offload: Callable[[int], Path | None],
    dtype: torch.dtype,
) -> Activations:
    """The store of `count` sequences like the one whose hidden states are given, (1, T, D) or (states, 1, T, D)."""
    if hidden.ndim not in (3, 4) or hidden.shape[-3] != 1:
        raise UnsupportedError(
            f"the blocks of this architecture take hidden states of the shape {tuple(hidden.shape)}, and only "
            "(texts, tokens, width), or some of them side by side, can be computed one by one"
        )
    length, width = hidden.shape[-2:]
    beside = beside_states(skeleton.model.config.get_text_config())
    size = count * (hidden.numel() + length * (beside.of_text + beside.shared)) * dtype.itemsize
    return Activations(count, length, width, offload(size), dtype, len(hidden) if hidden.ndim == 4 else 0)


class Passes:
    """Passes through the blocks, forward and back, with one block's weights in memory and a batch of some tokens.

    `as_tuple` says whether the block that ran last returns a tuple.
    """

    def __init__(self, job: Job, tokens: int) -> None:
        self.as_tuple = False
        self.device = torch.device(job.device)
        self._job, self._tokens = job, tokens
        self._slopes = Shared(0, None)  # of the way back that is going on, by what blocks share

    def block(
        self, index: int, instead: Callable[[str], torch.Tensor | None] = lambda _name: None
    ) -> AbstractContextManager[nn.Module]:
        """Block `index` with its weights, the source's or those that `instead(full name)` gives."""
        return load_block(self._job.source, self._job.skeleton, index, self.device, DTYPE, instead)

    def forward(self, index: int, inputs: Activations, outputs: Activations) -> None:
        """Run block `index`, which has its weights; `outputs` may be its inputs' own store."""
        with torch.no_grad():
            for start, stop in inputs.batches(self._tokens):
                hidden = inputs.read(start, stop).to(self.device)
                outputs.write(start, self._run(index, inputs, range(start, stop), hidden))
        inputs.shared.next_block()
        outputs.shared = inputs.shared

    def backward(
        self, index: int, inputs: Activations, slopes: Activations, others: Iterable[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Run block `index` once more; a loss's gradients in `slopes`, by its outputs, become those by its inputs.

        Gradients by what blocks share go from those that take it to the one that puts it; the last block comes first.
        Yields of each batch the gradients by `others`, in which the batch's tensors need only be once it ran.
        """
        if index + 1 == len(inputs.arguments):
            self._slopes = Shared(len(inputs), inputs.path)
        for start, stop in inputs.batches(self._tokens):
            traced, batch = Traced(), range(start, stop)
            hidden = inputs.read(start, stop).to(self.device).detach().requires_grad_()
            with torch.enable_grad():
                out = self._run(index, inputs, batch, hidden, traced)
            ends, given = [out], [slopes.read(start, stop).to(self.device)]
            for key, made in traced.made.items():
                if key in self._slopes.keys(key[0]):  # later blocks took it
                    ends += made
                    slopes_of_made = self._slopes.read(key, batch)
                    given += [slope.to(value) for slope, value in zip(slopes_of_made, made, strict=True)]
            taken = [value for values in traced.taken.values() for value in values]
            with running(inputs.settings, block_of(index, self._job.skeleton.blocks[index])):
                inner, *gradients = torch.autograd.grad(ends, [hidden, *taken, *others], given)
            slopes.write(start, inner)
            by_taken = iter(gradients)
            for key, values in traced.taken.items():
                self._slopes.add(key, batch, tuple(next(by_taken) for _ in values))
            yield tuple(by_taken)
        if index == 0:
            self._slopes.close()

    def _run(
        self,
        index: int,
        inputs: Activations,
        sequences: Sequence[int],
        hidden: torch.Tensor,
        traced: Traced | None = None,
    ) -> torch.Tensor:
        out = inputs.call(index, self._job.skeleton.blocks[index], sequences, hidden, traced=traced)
        self.as_tuple = isinstance(out, tuple)
        return hidden_of(out)


class WindowWalk:
    """Windows of text on their way through the blocks, with one block's weights in memory at a time.

    `block(index)` gives a block with its weights, which may go at the end. Hidden states are in `dtype`; those of more
    than `offload_bytes` lie in a file of the system's temporary folder.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        values: Values,
        block: Callable[[int], AbstractContextManager[nn.Module]],
        device: torch.device,
        dtype: torch.dtype,
        offload_bytes: int,
        progress: Progress,
    ) -> None:
        self._skeleton, self._values, self._block = skeleton, values, block
        self._device, self._dtype = device, dtype
        self._offload_bytes, self._progress = offload_bytes, progress

    def outputs(self, windows: Sequence[Window]) -> Iterator[tuple[list[Window], Output]]:
        """Yield what comes out of the last block as it returns it, (B, T, D), batch after batch in order.

        Where a token has several hidden states side by side, that is (states, B, T, D).

        Raises UnsupportedError where blocks cannot be computed one by one.
        """
        for number, wave in enumerate(_waves(windows), 1):
            with ExitStack() as stack:
                runs = self._embedded(wave, stack)
                as_tuple = self._through([store for _, store in runs], number)
                for same, store in runs:
                    for start, stop in store.batches(BATCH_TOKENS):
                        hidden = store.read(start, stop).to(self._device)
                        yield same[start:stop], (hidden,) if as_tuple else hidden

    def _embedded(self, wave: list[Window], stack: ExitStack) -> list[tuple[list[Window], Activations]]:
        """Windows of one length and what flows into the first block; the stack closes the latter."""
        settings = self._skeleton.model.config.get_text_config()
        beside = beside_states(settings)
        each = int(settings.hidden_size) * beside.states + beside.of_text + beside.shared
        size = sum(len(window.ids) for window in wave) * each * self._dtype.itemsize
        folder = stack.enter_context(temporary_folder()) if size > self._offload_bytes else None
        runs: list[tuple[list[Window], Activations]] = []
        for _, group in groupby(wave, lambda window: len(window.ids)):
            same = list(group)
            ids = torch.stack([torch.from_numpy(window.ids) for window in same])
            path = None if folder is None else folder / f"{len(runs)}.offload"
            with torch.inference_mode(), products_everywhere():
                store = embed(self._values, self._skeleton, ids, self._device, lambda _, path=path: path, self._dtype)
            runs.append((same, stack.enter_context(closing(store))))
        trim_heap()
        return runs

    def _through(self, stores: list[Activations], number: int) -> bool:
        """Take a wave through all blocks; whether the last one returns tuples."""
        blocks = len(self._skeleton.blocks)
        batches = sum(len(store.batches(BATCH_TOKENS)) for store in stores)
        out: Output = ()
        with self._progress.step(f"blocks, windows in wave {number}", blocks * batches, work=True) as advance:
            trimmer = MemoryTrimmer()
            for index in range(blocks):
                with self._block(index) as module:
                    for store in stores:
                        for start, stop in store.batches(BATCH_TOKENS):
                            with torch.inference_mode(), products_everywhere():
                                hidden = store.read(start, stop).to(self._device)
                                out = store.call(index, module, range(start, stop), hidden)
                                store.write(start, hidden_of(out))
                            trimmer.trim()
                            advance()
                        store.shared.next_block()
                del module
        return isinstance(out, tuple)


def _waves(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Whole batches of windows, so many together that they hold `WAVE_TOKENS` or a little less, or one batch alone."""
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
