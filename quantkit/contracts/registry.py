"""The registry: methods, engines and probes are the files of three folders; each file holds one record.

`quantkit/methods/NAME.py` holds `METHOD`, `quantkit/engines/NAME.py` holds `ENGINE`, `quantkit/probes/NAME.py`
holds `PROBE`. The file's name is the name everywhere: in recipes, on the command line, in the docs.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quantkit.errors import RecipeError, near_miss
from quantkit.progress import Progress
from quantkit.recipe import ConvertRecipe, EvaluationSpec, Strict, parse

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from quantkit.artifact import Artifact
    from quantkit.checkpoints.rows import Rows
    from quantkit.contracts.model import Subject
    from quantkit.conversion.forecast import Shapes
    from quantkit.evaluation.baseline import Baseline
    from quantkit.evaluation.protocols import Cut, Window
    from quantkit.formats.source import Source
    from quantkit.numerics.grouped_weight import GroupedWeight
    from quantkit.report.records import Measurement


@dataclass
class Job:
    """One conversion under way. `folder` is the staging folder; `tell` adds a remark to manifest and screen.

    `drawn` are the calibration's token ids (S, T) int64 and a remark on them, once they have been drawn.
    `found` is what a method's check leaves for its work.
    `device` is torch's name of where the maths runs; activations beyond `spill_bytes` go to files of the folder.
    """

    source: Source
    recipe: ConvertRecipe
    options: Any
    progress: Progress = field(default_factory=Progress)
    folder: Path = Path()
    device: str = "cpu"
    spill_bytes: int = 2 << 30
    notes: list[str] = field(default_factory=list)
    tensor_types: dict[str, int] = field(default_factory=dict)
    resolved: dict[str, object] = field(default_factory=dict)
    calibration_digest: str = ""
    drawn: tuple[np.ndarray, str] | None = None
    disk_bytes: int = 0
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def bits(self) -> str:
        """The asked bits, in the words of the method's users."""
        assert self.recipe.bits is not None
        return self.recipe.bits

    def tell(self, note: str) -> None:
        """Add a remark once."""
        if note not in self.notes:
            self.notes.append(note)

    def count(self, tensor_type: str) -> None:
        """Count one tensor stored as `tensor_type`."""
        self.tensor_types[tensor_type] = self.tensor_types.get(tensor_type, 0) + 1


@dataclass(frozen=True)
class Held:
    """What a method holds at its peak on a decoder block, for the forecast of memory.

    `streams` of activations (0: it does not calibrate; 1.25: a quarter of the sequences goes through the unquantized
    model, too); `paused`: all batches wait inside the block; `work`: bytes beside the block, its activations and the
    forward pass.
    """

    streams: float = 0
    paused: bool = False
    work: int = 0


@dataclass(frozen=True)
class Method:
    """A way to quantize.

    check(job) refuses what cannot work, before any long work, and returns the bytes that the artifact will need.
    write(job) writes the standard files into job.folder.
    read(artifact) yields (tensor name of the source, dense tensor, its Rows or GroupedWeight) from the artifact's own
    bytes.
    weight_files are glob patterns of the files that hold weights.
    usage is Markdown for the model card: how engines load the artifact in FOLDER. {file} becomes the first weight
    file's name, {transformers} the lines that load a folder with transformers.
    light(options) says whether it needs no torch, in this process or in transformers.
    held(job, shapes) says what memory the work on a decoder block takes; without it there is no forecast.
    """

    name: str
    summary: str
    reference: str
    bits: tuple[str, ...]
    default_bits: str
    Options: type[Strict]
    check: Callable[[Job], int]
    write: Callable[[Job], None]
    read: Callable[[Artifact], Iterator[tuple[str, torch.Tensor | GroupedWeight | Rows]]]
    engines: tuple[str, ...]
    weight_files: tuple[str, ...] = ("*.safetensors",)
    keeps_values: bool = True
    calibrated: Callable[[Any], bool] = lambda _options: False
    usage: str = ""
    light: Callable[[Any], bool] = lambda _options: False
    held: Callable[[Job, Shapes], Held] | None = None

    def parse_bits(self, bits: str | int | None) -> str:
        """Return the method's own spelling of `bits`; raises RecipeError."""
        if bits is None:
            return self.default_bits
        for known in self.bits:
            if known.lower() == str(bits).lower():
                return known
        raise RecipeError(
            f"the method {self.name} has no bits {str(bits)!r}.{near_miss(bits, self.bits)} "
            f"It has: {', '.join(self.bits)}."
        )

    def parse_options(self, options: dict[str, Any]) -> Any:
        """Return the method's options record; raises RecipeError."""
        return parse(self.Options, options, f"options of the method {self.name}")


class Model(Protocol):
    """A loaded model. Token ids are int64, logits float32."""

    notes: tuple[str, ...]
    dtype: str

    def logits(self, ids: np.ndarray, first: int = 0) -> np.ndarray:
        """(B, T) token ids -> (B, T - first, V) logits of the positions from `first` on.

        Log-probabilities where the engine gives only those.
        """

    def pieces(self, windows: Sequence[Window]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits of the judged positions of all windows in order, (n, V) a few positions at a time.

        No piece reaches over the end of a window; at no time are the logits of a whole window in memory where the
        engine gives them in parts.
        """

    def stream(self, ids: list[int], count: int) -> Iterator[int]:
        """Yield `count` greedy tokens after the prompt `ids`, one by one as they are made."""


@dataclass(frozen=True)
class LoadSpec:
    """How a engine opens a subject: number of threads, longest context in tokens, dtype where it has a choice.

    `device` is one of the engine's.
    """

    threads: int
    n_ctx: int
    dtype: str | None = None
    device: str = "cpu"


def refuse_dtype(engine: str, dtype: str | None, known: Collection[str]) -> None:
    """Raise RecipeError for a dtype that a engine does not know."""
    if dtype is not None and dtype not in known:
        raise RecipeError(f"the engine {engine} has no dtype {dtype!r}; it has {', '.join(known)}")


@dataclass(frozen=True)
class Engine:
    """An engine. `refuses(subject)` gives the reason why it cannot open a subject, or None.

    `module` is what its interpreter must have; `install` says how it gets there. refuse(dtype, device) raises for a
    dtype that it does not have (None is its own choice), and for one of its `devices` that cannot be used here.
    Process variables that begin with `variables` change what it computes.
    """

    name: str
    summary: str
    module: str
    install: str
    refuses: Callable[[Subject], str | None]
    load: Callable[[Subject, LoadSpec], Model]
    devices: tuple[str, ...] = ("cpu",)
    refuse: Callable[[str | None, str], None] = lambda _dtype, _device: None
    variables: str | None = None


@dataclass(frozen=True)
class ProbeJob:
    """What a probe may use: the loaded model, its subject, token windows, the source's baseline, and settings.

    `n_ctx` is the longest context that the model was loaded for, `loading_peak` the resident memory in bytes that
    loading it took. `kept` is where finished windows are kept until all are done, `save` where all positions are
    wanted in the end.
    """

    model: Model
    subject: Subject
    spec: EvaluationSpec
    threads: int
    cut: Cut
    progress: Progress
    baseline: Callable[[], Baseline] | None = None
    kept: Path | None = None
    save: Path | None = None
    n_ctx: int = 512
    loading_peak: int = 0


@dataclass(frozen=True)
class Probe:
    """A measurement. `per_threads` probes run once for each asked thread count. Probes run in `order`.

    `n_ctx` is the context in tokens that it needs, of which a model may have less; `usual` probes run where none is
    named.
    """

    name: str
    summary: str
    run: Callable[[ProbeJob], list[Measurement]]
    order: int
    per_threads: bool = False
    n_ctx: int = 0
    usual: bool = True


@cache
def _names(folder: str) -> tuple[str, ...]:
    package = importlib.import_module(f"quantkit.{folder}")
    return tuple(sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")))


@cache
def _record(folder: str, attribute: str, name: str) -> Any:
    record = getattr(importlib.import_module(f"quantkit.{folder}.{name}"), attribute)
    if record.name != name:
        raise RuntimeError(f"quantkit/{folder}/{name} holds a record named {record.name!r}; the names must agree")
    return record


def _find(kind: str, folder: str, attribute: str, name: str) -> Any:
    # Only the file that is asked for is imported: an engine's process must not carry the other engines.
    known = _names(folder)
    if name not in known:
        raise RecipeError(f"unknown {kind} {name!r}.{near_miss(name, known)} Known: {', '.join(known)}.")
    return _record(folder, attribute, name)


def find_method(name: str) -> Method:
    """Look a method up; raises RecipeError with a near-miss hint."""
    return _find("method", "methods", "METHOD", name)


def find_engine(name: str) -> Engine:
    """Look a engine up; raises RecipeError with a near-miss hint."""
    return _find("engine", "engines", "ENGINE", name)


def find_probe(name: str) -> Probe:
    """Look a probe up; raises RecipeError with a near-miss hint."""
    return _find("probe", "probes", "PROBE", name)


def methods() -> dict[str, Method]:
    """All methods by name."""
    return {name: find_method(name) for name in _names("methods")}


def engines() -> dict[str, Engine]:
    """All engines by name."""
    return {name: find_engine(name) for name in _names("engines")}


def probes() -> dict[str, Probe]:
    """All probes by name, in the order in which they run."""
    return dict(sorted({name: find_probe(name) for name in _names("probes")}.items(), key=lambda item: item[1].order))
