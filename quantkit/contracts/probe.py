"""What a probe is, and the job that it gets."""

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
    """What the source computes at the scored positions."""

    def logits(self, start: int, count: int) -> NDArray[np.float32]:
        """(count, V) float32 of the scored positions from number `start` on."""


@dataclass(frozen=True)
class ProbeJob:
    """What a probe may use: the model, loaded by an engine, token windows, the source's baseline, and settings.

    `n_ctx` is the longest context in tokens that the model was loaded for, `loading_peak` the resident memory in bytes
    that loading took. The file `resume` holds the scored positions of finished batches until all are finished; all
    scored positions go to the file `save` in the end.
    """

    loaded: LoadedModel
    model: Model
    spec: EvaluationSpec
    threads: int
    cut: Cut
    progress: Progress
    resume: Path
    baseline: Callable[[], Baseline] | None = None
    save: Path | None = None
    n_ctx: int = 512
    loading_peak: int = 0


@dataclass(frozen=True)
class Probe:
    """A measurement, a row of `evaluation/probes.py`.

    `generates`: it needs tokens one by one, which a model that is computed block by block does not give. `per_threads`:
    it runs once for each thread count. `needs_source`: it uses the source's baseline if there is one. `n_ctx`: tokens
    of context that it needs, of which a model may have less. `usual`: it runs if no probe is named.
    """

    name: str
    run: Callable[[ProbeJob], list[Measurement]]
    generates: bool = False
    per_threads: bool = False
    needs_source: bool = False
    n_ctx: int = 0
    usual: bool = True
