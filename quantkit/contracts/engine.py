"""What an engine must provide, and the model that it loads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from quantkit.contracts.model import Model
from quantkit.contracts.windows import Window
from quantkit.errors import RecipeError
from quantkit.progress import Progress
from quantkit.recipe import AUTO
from quantkit.system.device import CPU

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
    """How an engine opens a model: threads, the longest context in tokens, dtype (None: its own choice), device.

    `walk`: with one decoder block's weights in memory at a time, for an engine that `walks`; hidden states of more than
    `offload_bytes` go to a file then, and `progress` is told how far it is.
    """

    threads: int
    n_ctx: int
    dtype: str | None = None
    device: str = CPU
    walk: bool = False
    offload_bytes: int = 0
    progress: Progress = field(default_factory=Progress)


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
    """What decides the memory of a model's weights: its format, the number of its weights and of those outside the
    blocks, the bytes of its files, the type in its config.json, and the bits of an artifact's recipe.
    """

    format: str
    parameters: int
    outside: int
    weight_bytes: int
    dtype: str
    bits: str | None = None


@dataclass(frozen=True)
class Engine:
    """An engine. A format names the engines that take it; `opens` is the answer for an artifact of another format.

    `module` is what its interpreter must have; `install` says how to get it. refuse(dtype) raises for a dtype that it
    does not have. find_device(asked) returns the device that it computes on in this interpreter for auto, cpu or
    cuda:1, or raises RecipeError; refuse_model(model, dtype, device) raises for a model that it would compute wrongly
    or not at all. Process variables that begin with one of `variables` change what it computes. `sets_threads`: it
    loads a ThreadedModel; without it each number of threads gets a process of its own. `in_torch`: it loads a
    StatesModel, whose logits come a few positions at a time. holds(stats, dtype) returns the bytes that the weights
    take in memory on a CPU; without it the memory is not estimated. `walks`: it can compute windows with one decoder
    block's weights in memory at a time.
    `process`: whether a new interpreter evaluates, or a fork of one that has imported torch and transformers, which
    saves time (system/forking.py). `both` is for an engine that needs neither, whose memory and speed are its own then:
    only the divergence, which needs the source's output layer, is measured in a fork.
    """

    name: str
    module: str
    install: str
    opens: str
    load: Callable[[Model, LoadSpec], LoadedModel]
    find_device: Callable[[str], str] = on_cpu
    refuse: Callable[[str | None], None] = lambda _dtype: None
    refuse_model: Callable[[Model, str | None, str], None] = lambda _model, _dtype, _device: None
    variables: tuple[str, ...] = KERNEL_VARIABLES
    sets_threads: bool = False
    in_torch: bool = False
    walks: bool = False
    process: Literal["new", "forked", "both"] = "new"
    holds: Callable[[WeightStats, str | None], int] | None = None
