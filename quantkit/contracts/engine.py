"""Interface of engines, of the models that they load, and of the token windows that the models compute."""

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
BATCH_TOKENS = 2048  # in windows of one length computed together


@dataclass(frozen=True)
class Window:
    """Token ids (T,) of one forward pass; `targets`: the right next tokens at positions `first`, `first` + 1, ..."""

    ids: Ids
    first: int
    targets: Ids
    document: int = 0

    @property
    def scored(self) -> slice:
        """Return the slice of positions whose logits are scored."""
        return slice(self.first, self.first + len(self.targets))

    def pairs(self, pieces: Iterator[NDArray[np.float32]]) -> Iterator[tuple[NDArray[np.float32], Ids]]:
        """Yield (logits (n, V), targets (n,)) of this window, with logits taken from an engine's `pieces`."""
        done = 0
        while done < len(self.targets):
            logits = next(pieces)
            yield logits, self.targets[done : done + len(logits)]
            done += len(logits)


def tokens_in(windows: Iterable[Window]) -> int:
    """Return the total number of tokens in the windows."""
    return sum(len(window.ids) for window in windows)


def longest_in(windows: Iterable[Window]) -> int:
    """Return the length of the longest window in tokens."""
    return max(len(window.ids) for window in windows)


def positions_in(windows: Iterable[Window]) -> int:
    """Return the number of scored positions in the windows."""
    return sum(len(window.targets) for window in windows)


@dataclass(frozen=True)
class Cut:
    """A text cut into windows, in order; `about` describes them in a report.

    `sizes` (documents, 2): number of words and of bytes of each document.
    """

    windows: tuple[Window, ...]
    about: Windows
    sizes: NDArray[np.int64]

    def save(self, path: Path) -> None:
        """Write the windows to an .npz file without pickles, for another process."""
        np.savez(
            path,
            ids=np.concatenate([w.ids for w in self.windows]),
            targets=np.concatenate([w.targets for w in self.windows]),
            shape=np.array([[len(w.ids), w.first, len(w.targets), w.document] for w in self.windows]),
            sizes=self.sizes,
            about=np.array(self.about.model_dump_json()),
        )


def load_cut(path: Path) -> Cut:
    """Read a file that `Cut.save` wrote."""
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
    """Yield batches of consecutive windows of equal length, with at most `BATCH_TOKENS` tokens or one window.

    The last digits of logits depend on the batch, so interrupted work resumes at a batch boundary.
    """
    batch: list[Window] = []
    for window in windows:
        if batch and (len(window.ids) != len(batch[0].ids) or (len(batch) + 1) * len(window.ids) > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


# Environment variables of oneDNN and MKL, which multiply matrices in several engines.
KERNEL_VARIABLES = ("DNNL_", "ONEDNN_", "MKL_")


class LoadedModel(Protocol):
    """A model loaded by an engine: `dtype` that it computes in, and `notes` for users.

    Token ids are int64, logits float32.
    """

    notes: tuple[str, ...]
    dtype: str

    def pieces(self, windows: Sequence[Window]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits (n, V) of the scored positions of all windows, in order, a few positions at a time.

        They are log-probabilities if the engine returns only those. No piece crosses the end of a window. If the engine
        returns logits in parts, so a whole window's logits are never in memory.
        """

    def stream(self, ids: list[int], count: int) -> Iterator[int]:
        """Yield `count` greedily generated tokens after the prompt `ids`, each as soon as it is generated."""


@runtime_checkable
class ThreadedModel(LoadedModel, Protocol):
    """A loaded model that can change its number of threads."""

    def set_threads(self, threads: int) -> None:
        """Use this number of threads from now on."""


@runtime_checkable
class StatesModel(LoadedModel, Protocol):
    """A loaded torch model that also returns final hidden states, from which baselines are made."""

    def states(self, windows: Sequence[Window]) -> Iterator[torch.Tensor]:
        """Yield (n, D) for each window, in order: the output layer's inputs at the scored positions."""

    def to(self, dtype: str) -> None:
        """Change the dtype that the model computes in."""


@dataclass(frozen=True)
class LoadSpec:
    """Settings with which an engine loads a model."""

    threads: int
    n_ctx: int  # longest context in tokens
    dtype: str | None = None  # None: the engine's own choice
    device: str = CPU
    walk: bool = False  # one decoder block in memory at a time, for engines that `walk`
    offload_bytes: int = 0  # in a walk, more bytes of hidden states go to a file
    progress: Progress = field(default_factory=Progress)  # of a walk
    kv_cache: str | None = None  # type of the cached keys and values; None: the engine's own


def on_cpu(asked: str) -> str:
    """Return "cpu" for an engine without GPU support; raises RecipeError if another device is asked for."""
    if asked not in (AUTO, CPU):
        raise RecipeError("it computes on cpu")
    return CPU


def refuse_dtype(engine: str, dtype: str | None, known: Collection[str]) -> None:
    """Raise RecipeError if the engine does not support `dtype` (None: its default)."""
    if dtype is not None and dtype not in known:
        raise RecipeError(f"the engine {engine} has no dtype {dtype!r}; it has {', '.join(known)}")


@dataclass(frozen=True)
class WeightStats:
    """Facts about a model from which an engine's weight memory is estimated."""

    format: str
    parameters: int
    outside: int  # parameters outside the blocks
    weight_bytes: int  # bytes of its weight files
    dtype: str  # in config.json
    bits: str | None = None  # in an artifact's recipe


@dataclass(frozen=True)
class Engine:
    """An engine: a library that computes models. Each format lists the engines that load it.

    `process`: evaluate in a new interpreter, or in a fork of one that has imported torch and transformers, to save time
    (system/forking.py). With `both`, only the divergence, which needs the source's output layer, runs in a fork: memory
    and speed are then measured in a process without torch and transformers.
    """

    name: str
    module: str  # module that its interpreter must have
    install: str  # installation hint
    opens: str  # what it opens, shown to users of other formats
    load: Callable[[Model, LoadSpec], LoadedModel]
    # Maps auto, cpu or cuda:1 to its device in this interpreter; raises RecipeError.
    find_device: Callable[[str], str] = on_cpu
    refuse: Callable[[str | None], None] = lambda _dtype: None  # raises for a dtype that it lacks
    # Raises for a model that it would compute wrongly or not at all, with this dtype and device.
    refuse_model: Callable[[Model, str | None, str], None] = lambda _model, _dtype, _device: None
    variables: tuple[str, ...] = KERNEL_VARIABLES  # prefixes of environment variables that change its results
    kv_caches: tuple[str, ...] = ()  # types of cached keys and values to choose from
    sets_threads: bool = False  # it loads a ThreadedModel; otherwise each thread count gets its own process
    in_torch: bool = False  # it loads a StatesModel, which returns logits a few positions at a time
    walks: bool = False  # it can compute with one decoder block in memory at a time
    process: Literal["new", "forked", "both"] = "new"
    server: str | None = None  # its OpenAI-compatible server, if `quantkit serve` starts one (serving/servers.py)
    # Returns the bytes of the weights in memory on a CPU with this dtype; None: memory is not estimated.
    holds: Callable[[WeightStats, str | None], int] | None = None
