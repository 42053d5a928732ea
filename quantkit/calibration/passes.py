"""Ways through a model's decoder blocks beside the walk: in, through, and back.

In: token ids become the first block's inputs, with the arguments of every block. Through and back: blocks run one by
one on what flows into them, and once more for gradients. Windows of text that are judged go in and through, too, some
thousand tokens at a time: what they have come to is not lost with the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from quantkit.calibration.activations import DTYPE, Activations
from quantkit.calibration.flow.calls import Calls, call_block, hidden_of, same_values
from quantkit.calibration.flow.shared import Shared, Shelf, Traced
from quantkit.contracts.method import Job
from quantkit.contracts.windows import BATCH_TOKENS, Window, alike
from quantkit.errors import UnsupportedError
from quantkit.models.architectures import block_of, running
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
        """One that lies outside the blocks, in its shape."""

    def rows(self, parameter: str, rows: list[int]) -> torch.Tensor:
        """Some of its rows, (len(rows), ...), without the others where that can be."""


@dataclass(frozen=True)
class SourceValues:
    """Those of a source."""

    source: Source
    skeleton: Skeleton

    def tensor(self, parameter: str) -> torch.Tensor:
        """All of it."""
        return self.source.tensor(source_name(self.source, self.skeleton, parameter))

    def rows(self, parameter: str, rows: list[int]) -> torch.Tensor:
        """Those rows alone."""
        name = source_name(self.source, self.skeleton, parameter)
        return torch.cat([self.source.rows(name, row, row + 1) for row in rows])


def embed(
    values: Values,
    skeleton: Skeleton,
    ids: torch.Tensor,
    device: torch.device,
    offload: Callable[[int], Path | None],
    dtype: torch.dtype = DTYPE,
) -> tuple[Activations, list[Arguments]]:
    """Embed (S, T) ids -> hidden states (S, T, D) in `dtype`, and record each block's arguments.

    Of token embeddings only the rows of tokens that occur are loaded. `offload` tells the file for so many bytes of
    hidden states and of what goes with them, or None to keep them in memory. Raises UnsupportedError where what blocks
    are called with cannot be kept.
    """
    blocks = skeleton.blocks
    real_blocks = list(blocks)
    recorders = [Recorder(block, last=block is real_blocks[-1]) for block in real_blocks]
    base = skeleton.model.base_model
    prefix = f"{skeleton.model.base_model_prefix}."
    empty: list[tuple[str, nn.Parameter]] = []
    store: Activations | None = None
    calls: Calls | None = None
    before = f"{type(base).__name__}, around its blocks"

    def rows(name: str, numbers: list[int]) -> torch.Tensor:
        return values.rows(prefix + name, numbers).to(device, dtype)

    try:
        for i, recorder in enumerate(recorders):
            blocks[i] = recorder
        with tables_by_rows(base, rows, ids.unique().tolist()) as by_rows, torch.no_grad():
            for name, parameter in list(base.named_parameters()):
                if name not in by_rows:
                    empty.append((name, parameter))
                    set_parameter(base, name, values.tensor(prefix + name).to(device, dtype))
            base.to(device)
            for i, row in enumerate(ids.to(device)):
                with suppress(StopForward), running(skeleton.model.config, before):
                    base(input_ids=row[None], use_cache=False)
                hidden = recorders[0].hidden
                if store is None or calls is None:
                    store = _store_for(skeleton, hidden, len(ids), offload, dtype)
                    calls = Calls(len(ids), store.path)
                    store.owned = calls.stores
                    _refuse_changes(recorders)
                store.write(i, hidden)
                calls.add(i, recorders)
            if calls is not None and calls.stores:
                for recorder in recorders:
                    recorder.shift = 1.0
                with suppress(StopForward), running(skeleton.model.config, before):
                    base(input_ids=ids[:1].to(device), use_cache=False)
                calls.refuse_following(recorders)
    except BaseException:
        if store is not None:
            store.close()
        raise
    finally:
        for i, block in enumerate(real_blocks):
            blocks[i] = block
        for name, parameter in empty:
            # The parameter itself, not its value: a head that is tied to the embedding stays so.
            path, _, leaf = name.rpartition(".")
            base.get_submodule(path).register_parameter(leaf, parameter)
    assert store is not None
    assert calls is not None
    return store, calls.arguments()


def _refuse_changes(recorders: list[Recorder]) -> None:
    """Raise UnsupportedError where a model changes the hidden states between two blocks."""
    first = recorders[0].hidden
    if not all(same_values(recorder.hidden, first) for recorder in recorders):
        raise UnsupportedError(
            "this architecture changes hidden states between its blocks, so they cannot be computed one by one"
        )


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

    def __init__(self, job: Job, arguments: list[Arguments], tokens: int) -> None:
        self.as_tuple = False
        self.device = torch.device(job.device)
        self._job, self._arguments, self._tokens = job, arguments, tokens
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
        if index + 1 == len(self._arguments):
            self._slopes = Shared(len(inputs), inputs.path)
        for start, stop in inputs.batches(self._tokens):
            traced = Traced(range(start, stop), self._slopes)
            hidden = inputs.read(start, stop).to(self.device).detach().requires_grad_()
            with torch.enable_grad():
                out = self._run(index, inputs, range(start, stop), hidden, traced.shelf)
            slope = slopes.read(start, stop).to(self.device)
            made, of_made, taken = *traced.made(), traced.taken()
            with self._running(index):
                inner, *gradients = torch.autograd.grad([out, *made], [hidden, *taken, *others], [slope, *of_made])
            slopes.write(start, inner)
            traced.hand_back(gradients[: len(taken)])
            yield tuple(gradients[len(taken) :])
        if index == 0:
            self._slopes.close()

    def _run(
        self,
        index: int,
        inputs: Activations,
        sequences: Sequence[int],
        hidden: torch.Tensor,
        shelf: Callable[..., Shelf] = Shelf,
    ) -> torch.Tensor:
        block = self._job.skeleton.blocks[index]
        with self._running(index):
            out = call_block(block, self._arguments[index], hidden, inputs, sequences, shelf=shelf)
            self.as_tuple = isinstance(out, tuple)
            return hidden_of(out)

    def _running(self, index: int) -> AbstractContextManager[None]:
        return running(self._job.skeleton.model.config, block_of(index, self._job.skeleton.blocks[index]))


@dataclass(frozen=True)
class _Run:
    """Windows of one length in a wave, what flows into the next block, and what the blocks are called with."""

    windows: list[Window]
    store: Activations
    arguments: list[Arguments]

    def batches(self) -> list[tuple[int, int]]:
        """Bounds of the windows that are computed together: those of `alike`."""
        return self.store.batches(BATCH_TOKENS)


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

    def outputs(
        self, windows: Sequence[Window]
    ) -> Iterator[tuple[list[Window], torch.Tensor | tuple[torch.Tensor, ...]]]:
        """Yield what comes out of the last block as it returns it, (B, T, D), batch after batch in order.

        Where a token has several hidden states side by side, that is (states, B, T, D).

        Raises UnsupportedError where blocks cannot be computed one by one.
        """
        for number, wave in enumerate(_waves(windows), 1):
            with ExitStack() as stack:
                runs = self._embedded(wave, stack)
                as_tuple = self._through(runs, number)
                for run in runs:
                    for start, stop in run.batches():
                        hidden = run.store.read(start, stop).to(self._device)
                        yield run.windows[start:stop], (hidden,) if as_tuple else hidden

    def _embedded(self, wave: list[Window], stack: ExitStack) -> list[_Run]:
        """The windows of a wave as the first block gets them; what they lie in is closed with the stack."""
        settings = self._skeleton.model.config.get_text_config()
        beside = beside_states(settings)
        each = int(settings.hidden_size) * beside.states + beside.of_text + beside.shared
        size = sum(len(window.ids) for window in wave) * each * self._dtype.itemsize
        folder = stack.enter_context(temporary_folder()) if size > self._offload_bytes else None
        runs: list[_Run] = []
        for _, group in groupby(wave, lambda window: len(window.ids)):
            same = list(group)
            ids = torch.stack([torch.from_numpy(window.ids) for window in same])
            path = None if folder is None else folder / f"{len(runs)}.offload"
            place = partial(_in_file, path)
            with torch.inference_mode(), products_everywhere():
                store, arguments = embed(self._values, self._skeleton, ids, self._device, place, self._dtype)
            stack.enter_context(closing(store))
            runs.append(_Run(same, store, arguments))
        trim_heap()
        return runs

    def _through(self, runs: list[_Run], number: int) -> bool:
        """Take a wave through all blocks; whether the last one returns tuples."""
        blocks = len(self._skeleton.blocks)
        batches = sum(len(run.batches()) for run in runs)
        out: torch.Tensor | tuple[torch.Tensor, ...] = ()
        with self._progress.step(f"blocks, windows in wave {number}", blocks * batches, work=True) as advance:
            trimmer = MemoryTrimmer()
            for index in range(blocks):
                with self._block(index) as module:
                    for run in runs:
                        for start, stop in run.batches():
                            with torch.inference_mode(), products_everywhere():
                                hidden = run.store.read(start, stop).to(self._device)
                                sequences = range(start, stop)
                                with running(self._skeleton.model.config, block_of(index, module)):
                                    out = call_block(module, run.arguments[index], hidden, run.store, sequences)
                                run.store.write(start, hidden_of(out))
                            trimmer.trim()
                            advance()
                        run.store.shared.next_block()
                del module
        return isinstance(out, tuple)


def _in_file(path: Path | None, _size: int) -> Path | None:
    return path


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
