"""What an engine must provide: the model that it loads, and the windows of tokens that this computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quantkit.contracts.model import Model
from quantkit.errors import RecipeError
from quantkit.records.report import Windows
from quantkit.system.device import AUTO, CPU
from quantkit.system.progress import Progress

if TYPE_CHECKING:
    import torch

Ids = NDArray[np.int64]
BATCH_TOKENS = 2048  # of windows of one length that are computed together


@dataclass(frozen=True)
class Window:
    """Token ids (T,) that are computed at once; the logits at `first`, `first` + 1, ... are scored by `targets`."""

    ids: Ids
    first: int
    targets: Ids
    document: int = 0

    @property
    def scored(self) -> slice:
        """The positions whose logits are scored."""
        return slice(self.first, self.first + len(self.targets))

    def pairs(self, pieces: Iterator[NDArray[np.float32]]) -> Iterator[tuple[NDArray[np.float32], Ids]]:
        """Take this window's (n, V) logits from an engine's `pieces`, each with the targets that score it."""
        done = 0
        while done < len(self.targets):
            logits = next(pieces)
            yield logits, self.targets[done : done + len(logits)]
            done += len(logits)


def tokens_in(windows: Iterable[Window]) -> int:
    """Return the number of tokens that are computed."""
    return sum(len(window.ids) for window in windows)


def longest_in(windows: Iterable[Window]) -> int:
    """Return the number of tokens of the longest window."""
    return max(len(window.ids) for window in windows)


def positions_in(windows: Iterable[Window]) -> int:
    """Return the number of positions that are scored."""
    return sum(len(window.targets) for window in windows)


@dataclass(frozen=True)
class Cut:
    """The windows in order, their entry in a report, and the words and bytes of each document (documents, 2)."""

    windows: tuple[Window, ...]
    about: Windows
    sizes: NDArray[np.int64]

    def save(self, path: Path) -> None:
        """Write the windows for another process, as plain arrays."""
        np.savez(
            path,
            ids=np.concatenate([w.ids for w in self.windows]),
            targets=np.concatenate([w.targets for w in self.windows]),
            shape=np.array([[len(w.ids), w.first, len(w.targets), w.document] for w in self.windows]),
            sizes=self.sizes,
            about=np.array(self.about.model_dump_json()),
        )


def load_cut(path: Path) -> Cut:
    """Read what `Cut.save` wrote."""
    with np.load(path, allow_pickle=False) as stored:
        shape, sizes, about = stored["shape"], stored["sizes"], str(stored["about"])
        ids = np.split(stored["ids"], np.cumsum(shape[:-1, 0]))
        targets = np.split(stored["targets"], np.cumsum(shape[:-1, 2]))
    windows = (
        Window(i, int(first), t, int(document))
        for i, t, (_, first, _, document) in zip(ids, targets, shape, strict=True)
    )
    return Cut(tuple(windows), Windows.model_validate_json(about), sizes)


def alike(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Yield batches: neighbours of one length, at most `BATCH_TOKENS` together.

    Windows of a batch are computed together, and the last digits of logits depend on it. So work that was interrupted
    goes on at the edge of a batch.
    """
    batch: list[Window] = []
    for window in windows:
        if batch and (len(window.ids) != len(batch[0].ids) or (len(batch) + 1) * len(window.ids) > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


# Process variables of the libraries that multiply for several engines: oneDNN and MKL.
KERNEL_VARIABLES = ("DNNL_", "ONEDNN_", "MKL_")


class LoadedModel(Protocol):
    """A model that an engine has loaded, the type that it computes in, and notes for its user.

    Token ids are int64, logits float32.
    """

    notes: tuple[str, ...]
    dtype: str

    def pieces(self, windows: Sequence[Window]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits of the scored positions of all windows in order, (n, V) a few positions at a time.

        Log-probabilities if the engine gives only those. No piece reaches over the end of a window; the logits of a
        whole window are never in memory if the engine gives them in parts.
        """

    def stream(self, ids: list[int], count: int) -> Iterator[int]:
        """Yield `count` greedy tokens after the prompt `ids`, one by one as they are made."""


@runtime_checkable
class ThreadedModel(LoadedModel, Protocol):
    """A loaded model that can change its number of threads."""

    def set_threads(self, threads: int) -> None:
        """Compute on so many threads from now on."""


@runtime_checkable
class StatesModel(LoadedModel, Protocol):
    """A loaded model in torch that also gives its hidden states, from which a baseline is made."""

    def states(self, windows: Sequence[Window]) -> Iterator[torch.Tensor]:
        """Yield (n, D) of each window in order: what goes into the output layer at its scored positions."""

    def to(self, dtype: str) -> None:
        """Change the type that the model computes in."""


@dataclass(frozen=True)
class LoadSpec:
    """How an engine opens a model."""

    threads: int
    n_ctx: int  # longest context in tokens
    dtype: str | None = None  # None: the engine's own choice
    device: str = CPU
    walk: bool = False  # with one decoder block's weights in memory at a time, for an engine that `walks`
    offload_bytes: int = 0  # in a walk, more bytes of hidden states go to a file
    progress: Progress = field(default_factory=Progress)  # of a walk
    kv_cache: str | None = None  # type of the cached keys and values; None: the engine's own


def on_cpu(asked: str) -> str:
    """Return "cpu"; raises RecipeError for another device."""
    if asked not in (AUTO, CPU):
        raise RecipeError("it computes on cpu")
    return CPU


def refuse_dtype(engine: str, dtype: str | None, known: Collection[str]) -> None:
    """Raise RecipeError for a dtype that an engine does not know."""
    if dtype is not None and dtype not in known:
        raise RecipeError(f"the engine {engine} has no dtype {dtype!r}; it has {', '.join(known)}")


@dataclass(frozen=True)
class WeightStats:
    """What decides the memory of a model's weights."""

    format: str
    parameters: int
    outside: int  # parameters outside the blocks
    weight_bytes: int  # of its files
    dtype: str  # in config.json
    bits: str | None = None  # in an artifact's recipe


@dataclass(frozen=True)
class Engine:
    """An engine. A format names the engines that take it.

    `process`: a new interpreter evaluates, or a fork of one that has imported torch and transformers, which saves time
    (system/forking.py). With `both` only the divergence, which needs the source's output layer, is measured in a fork:
    the memory and the speed of an engine that needs neither are its own then.
    """

    name: str
    module: str  # that its interpreter must have
    install: str  # how to get it
    opens: str  # what it opens, for the user of another format
    load: Callable[[Model, LoadSpec], LoadedModel]
    # From auto, cpu or cuda:1 to the device that it computes on in this interpreter; raises RecipeError.
    find_device: Callable[[str], str] = on_cpu
    refuse: Callable[[str | None], None] = lambda _dtype: None  # a dtype that it does not have
    # A model that it would compute wrongly or not at all, with this dtype and device.
    refuse_model: Callable[[Model, str | None, str], None] = lambda _model, _dtype, _device: None
    variables: tuple[str, ...] = KERNEL_VARIABLES  # beginnings of environment variables that change what it computes
    kv_caches: tuple[str, ...] = ()  # types of cached keys and values that it has a choice of
    sets_threads: bool = False  # it loads a ThreadedModel; else each number of threads gets a process of its own
    in_torch: bool = False  # it loads a StatesModel, whose logits come a few positions at a time
    walks: bool = False  # it can compute with one decoder block's weights in memory at a time
    process: Literal["new", "forked", "both"] = "new"
    server: str | None = None  # its OpenAI-compatible server, if `quantkit serve` starts it (serving/servers.py)
    # Bytes that the weights take in memory on a CPU with this dtype; None: the memory is not estimated.
    holds: Callable[[WeightStats, str | None], int] | None = None
