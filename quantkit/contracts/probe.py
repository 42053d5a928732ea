"""What a measurement must provide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.contracts.engine import Model
from quantkit.progress import Progress
from quantkit.recipe import EvaluationSpec

if TYPE_CHECKING:
    from quantkit.contracts.model import Subject
    from quantkit.contracts.windows import Cut
    from quantkit.evaluation.baseline import Baseline
    from quantkit.report.records import Measurement


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
