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
        """Those rows alone."""
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
    """Embed (S, T) ids -> hidden states (S, T, D) in `dtype`, with the arguments of each block.

    Of token embeddings only the rows of tokens that occur are loaded. What takes more than `room` bytes goes to files
    at `path`. Raises UnsupportedError where what blocks are called with cannot be kept.
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
            # The parameter itself, not its value: a head that is tied to the embedding stays so.
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
    """The hidden states that `run` gives for each row of ids, and the blocks' arguments."""
    hidden = run(ids[0])
    if hidden.ndim not in (3, 4) or hidden.shape[-3] != 1:
        raise UnsupportedError(
            f"the blocks of this architecture take hidden states of the shape {tuple(hidden.shape)}, and only "
            "(texts, tokens, width), or some of them side by side, can be computed one by one"
        )
    if not all(same_values(recorder.hidden, hidden) for recorder in recorders):
        raise UnsupportedError(
            "this architecture changes hidden states between its blocks, so they cannot be computed one by one"
        )
    length, width = hidden.shape[-2:]
    beside = beside_states(skeleton.model.config.get_text_config())
    size = len(ids) * (hidden.numel() + length * (beside.of_text + beside.shared)) * dtype.itemsize
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
            block, batches = self._job.skeleton.blocks[index], inputs.batches(self._tokens)
            self.as_tuple = isinstance(inputs.advance(index, block, batches, outputs), tuple)
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
            block = self._job.skeleton.blocks[index]
            with torch.enable_grad():
                out = hidden_of(inputs.call(index, block, batch, hidden, traced=traced))
            ends, given = [out], [slopes.read(start, stop).to(self.device)]
            for key, made in traced.made.items():
                if key in self._slopes.keys(key[0]):  # later blocks took it
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
    """Windows of text on their way through the blocks, with one block's weights in memory at a time.

    `block(index)` gives a block with its weights, which may go at the end. Hidden states are in `dtype`; those of more
    than `offload_bytes` lie in a file of the system's temporary folder.
    """

    skeleton: Skeleton
    values: Values
    block: Callable[[int], AbstractContextManager[nn.Module]]
    device: torch.device
    dtype: torch.dtype
    offload_bytes: int
    progress: Progress

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
                        hidden = store.read(start, stop).to(self.device)
                        yield same[start:stop], (hidden,) if as_tuple else hidden

    def _embedded(self, wave: list[Window], stack: ExitStack) -> list[tuple[list[Window], Activations]]:
        settings = self.skeleton.model.config.get_text_config()
        beside = beside_states(settings)
        each = int(settings.hidden_size) * beside.states + beside.of_text + beside.shared
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
        """Take a wave through all blocks; whether the last one returns tuples."""
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
