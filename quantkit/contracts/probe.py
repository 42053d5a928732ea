"""What a measurement must provide, and the ProbeJob that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quantkit.contracts.engine import LoadedModel
from quantkit.contracts.model import Model
from quantkit.contracts.windows import Cut
from quantkit.progress import Progress
from quantkit.recipe import EvaluationSpec
from quantkit.report.records import Measurement

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Baseline(Protocol):
    """What the source computes at the judged positions."""

    def logits(self, start: int, count: int) -> NDArray[np.float32]:
        """(count, V) float32 of the judged positions from number `start` on."""


@dataclass(frozen=True)
class ProbeJob:
    """What a probe may use: the model, loaded by an engine, token windows, the source's baseline, and settings.

    `n_ctx` is the longest context in tokens that the model was loaded for, `loading_peak` the resident memory in bytes
    that loading it took. Finished windows lie in the file `resume` until all are done; all positions go to the file
    `save` in the end.
    """

    loaded: LoadedModel
    model: Model
    spec: EvaluationSpec
    threads: int
    cut: Cut
    progress: Progress
    baseline: Callable[[], Baseline] | None = None
    resume: Path | None = None
    save: Path | None = None
    n_ctx: int = 512
    loading_peak: int = 0


@dataclass(frozen=True)
class Probe:
    """A measurement. `per_threads` probes run once for each thread count. Probes run in `order`.

    `n_ctx` is the context in tokens that it needs, of which a model may have less; `usual` probes run where none is
    named. `generates`: it needs tokens one by one, which a model that is computed block by block does not give.
    `needs_source`: it takes the source's baseline, where there is one.
    """

    name: str
    summary: str
    run: Callable[[ProbeJob], list[Measurement]]
    order: int
    per_threads: bool = False
    n_ctx: int = 0
    usual: bool = True
    generates: bool = False
    needs_source: bool = False
