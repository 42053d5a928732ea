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
from typing import Any, Protocol

import torch
from torch import nn

from quantkit.calibration.activations import DTYPE, Activations
from quantkit.contracts.method import Job
from quantkit.contracts.windows import BATCH_TOKENS, Window, alike
from quantkit.errors import UnsupportedError
from quantkit.models.skeleton import Skeleton, load_block, set_parameter, source_name
from quantkit.models.source import Source
from quantkit.models.stand_in import Arguments, Recorder, StopForward, refuse_apart
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
        return self.source.select_rows(source_name(self.source, self.skeleton, parameter), rows)


def embed(
    values: Values,
    skeleton: Skeleton,
    ids: torch.Tensor,
    device: torch.device,
    offload: Callable[[int], Path | None],
    dtype: torch.dtype = DTYPE,
) -> tuple[Activations, list[Arguments]]:
    """Embed (S, T) ids -> hidden states (S, T, D) in `dtype`, and record each block's arguments.

    Of the token embedding only the rows of tokens that occur are loaded. `offload` tells the file for so many bytes of
    hidden states, or None to keep them in memory. Raises UnsupportedError where the arguments depend on the text, or
    blocks on more than what the one before gave.
    """
    refuse_apart(skeleton)
    model, blocks = skeleton.model, skeleton.blocks
    real_blocks = list(blocks)
    recorders = [Recorder(block, last=block is real_blocks[-1]) for block in real_blocks]
    base = model.base_model
    embedding = model.get_input_embeddings()
    embedding.padding_idx = None  # a row that is perhaps not loaded; it only matters to gradients
    table = embedding.weight
    used, compact = torch.unique(ids, return_inverse=True)
    empty: list[tuple[str, nn.Parameter]] = []
    store: Activations | None = None
    first: list[torch.Tensor] = []
    try:
        for i, recorder in enumerate(recorders):
            blocks[i] = recorder
        for name, parameter in list(base.named_parameters()):
            empty.append((name, parameter))
            full = f"{model.base_model_prefix}.{name}"
            value = values.rows(full, used.tolist()) if parameter is table else values.tensor(full)
            set_parameter(base, name, value.to(device, dtype))
        base.to(device)
        with torch.no_grad():
            for i, row in enumerate(compact.to(device)):
                with suppress(StopForward):
                    base(input_ids=row[None], use_cache=False)
                hidden = recorders[0].hidden
                if hidden.ndim != 3:
                    raise UnsupportedError(
                        f"the blocks of this architecture take hidden states of the shape {tuple(hidden.shape)}, and "
                        "only (texts, tokens, width) can be computed one by one"
                    )
                if store is None:
                    size = len(ids) * hidden.numel() * dtype.itemsize
                    store = Activations(len(ids), hidden.shape[1], hidden.shape[2], offload(size), dtype)
                store.write(i, hidden)
                first = _refuse_other_arguments(recorders, first)
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
    return store, [(recorder.args, recorder.kwargs) for recorder in recorders]


def _refuse_other_arguments(recorders: list[Recorder], first: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors among the blocks' arguments, each once; raises UnsupportedError where they are not the `first` ones.

    What a block is called with beside the hidden states is kept for one sequence and stands for all of them.
    """
    found: dict[int, torch.Tensor] = {}
    for recorder in recorders:
        for value in (*recorder.args, *recorder.kwargs.values()):
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, torch.Tensor):
                    found.setdefault(id(part), part)
    tensors = list(found.values())
    if first and not all(map(torch.equal, first, tensors)):
        raise UnsupportedError(
            "the blocks of this architecture are called with values that depend on the text beside what flows through "
            "them, so they cannot be computed one by one"
        )
    return tensors


class Passes:
    """Passes through the blocks, forward and back, with one block's weights in memory and a batch of some tokens.

    `as_tuple` says whether the block that ran last returns a tuple.
    """

    def __init__(self, job: Job, arguments: list[Arguments], tokens: int) -> None:
        self.as_tuple = False
        self.device = torch.device(job.device)
        self._job, self._arguments, self._tokens = job, arguments, tokens

    def block(
        self, index: int, instead: Callable[[str], torch.Tensor | None] = lambda _name: None
    ) -> AbstractContextManager[nn.Module]:
        """Block `index` with its weights, the source's or those that `instead(full name)` gives."""
        return load_block(self._job.source, self._job.skeleton, index, self.device, DTYPE, instead)

    def forward(self, index: int, inputs: Activations, outputs: Activations) -> None:
        """Run block `index`, which has its weights; `outputs` may be its inputs' own store."""
        with torch.no_grad():
            for start, stop in inputs.batches(self._tokens):
                outputs.write(start, self._run(index, inputs.read(start, stop).to(self.device)))

    def backward(
        self, index: int, inputs: Activations, slopes: Activations, others: Iterable[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Run block `index` once more; a loss's gradients in `slopes`, by its outputs, become those by its inputs.

        Yields of each batch the gradients by `others`, in which the batch's tensors need only be once it ran.
        """
        for start, stop in inputs.batches(self._tokens):
            hidden = inputs.read(start, stop).to(self.device).detach().requires_grad_()
            with torch.enable_grad():
                out = self._run(index, hidden)
            slope = slopes.read(start, stop).to(self.device)
            before, *gradients = torch.autograd.grad(out, [hidden, *others], slope)
            slopes.write(start, before)
            yield tuple(gradients)

    def _run(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        out = call_block(self._job.skeleton.blocks[index], self._arguments[index], hidden)
        self.as_tuple = isinstance(out, tuple)
        return hidden_of(out)


def call_block(
    module: Callable[..., Any], arguments: Arguments, hidden: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """(B, T, D) -> (B, T, D) through a block, or something with the same arguments; as it returns it."""
    args = (for_batch(value, len(hidden)) for value in arguments[0])
    kwargs = {key: for_batch(value, len(hidden), key) for key, value in arguments[1].items()}
    out: torch.Tensor | tuple[torch.Tensor, ...] = module(hidden, *args, **kwargs)
    return out


def hidden_of(out: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The hidden states among what a block returns."""
    return out[0] if isinstance(out, tuple) else out


def for_batch(value: Any, size: int, key: str = "") -> Any:
    """Spread an argument that was recorded for one sequence over a batch of `size`; `key` is its keyword."""
    if isinstance(value, torch.Tensor) and key == "alibi" and value.ndim == 3:
        return value.repeat(size, 1, 1)  # (batch * heads, 1, T)
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == 1 and size > 1:
        return value.expand(size, *value.shape[1:])
    if isinstance(value, tuple):
        return tuple(for_batch(part, size) for part in value)
    return value


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
        width = int(self._skeleton.model.config.get_text_config().hidden_size)
        size = sum(len(window.ids) for window in wave) * width * self._dtype.itemsize
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
                                out = call_block(module, run.arguments[index], hidden)
                                run.store.write(start, hidden_of(out))
                            trimmer.trim()
                            advance()
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
