"""What an engine must provide, and the model that it loads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from quantkit.contracts.model import Model
from quantkit.contracts.windows import Window
from quantkit.errors import RecipeError
from quantkit.system.device import AUTO, CPU
from quantkit.system.progress import Progress

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

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
    sets_threads: bool = False  # it loads a ThreadedModel; else each number of threads gets a process of its own
    in_torch: bool = False  # it loads a StatesModel, whose logits come a few positions at a time
    walks: bool = False  # it can compute with one decoder block's weights in memory at a time
    process: Literal["new", "forked", "both"] = "new"
    server: str | None = None  # its OpenAI-compatible server, if `quantkit serve` starts it (serving/servers.py)
    # Bytes that the weights take in memory on a CPU with this dtype; None: the memory is not estimated.
    holds: Callable[[WeightStats, str | None], int] | None = None
