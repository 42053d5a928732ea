"""What a probe is, and the job that it gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quantkit.contracts.engine import LoadedModel
from quantkit.contracts.model import Model
from quantkit.contracts.windows import Cut
from quantkit.records.recipe import EvaluationSpec
from quantkit.records.report import Measurement
from quantkit.system.progress import Progress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Baseline(Protocol):
    """What the source computes at the scored positions."""

    def logits(self, start: int, count: int) -> NDArray[np.float32]:
        """(count, V) float32 of the scored positions from number `start` on."""


@dataclass(frozen=True)
class ProbeJob:
    """What a probe may use."""

    loaded: LoadedModel
    model: Model
    spec: EvaluationSpec
    threads: int
    cut: Cut
    progress: Progress
    resume: Path  # the file of the scored positions of finished batches, until all are finished
    baseline: Callable[[], Baseline] | None = None  # the source's
    save: Path | None = None  # the file for all scored positions
    n_ctx: int = 512  # longest context in tokens that the model was loaded for
    loading_peak: int = 0  # resident memory in bytes that loading took


@dataclass(frozen=True)
class Probe:
    """A measurement, a row of `evaluation/probes.py`."""

    name: str
    run: Callable[[ProbeJob], list[Measurement]]
    generates: bool = False  # it generates tokens, which a model cannot that is computed block by block
    per_threads: bool = False  # it runs once for each number of threads
    needs_source: bool = False  # it uses the source's baseline if there is one
    n_ctx: int = 0  # tokens of context that it wants; a model may have less
    usual: bool = True  # it runs if no probe is named
