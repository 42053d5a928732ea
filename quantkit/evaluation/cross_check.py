"""Cross-check: compare an artifact's native engine with the reference engine.

Both engines score the same positions. Half the mean square of the difference of their log-likelihoods estimates the
divergence of their distributions in nats. Two correct engines differ by rounding: of weights and activations to
bfloat16 (reference) or of activations to 8 bits (llama.cpp, CTranslate2 int8). An engine that misreads the file, or
whose arithmetic costs quality, differs by more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.contracts.model import ModelLike
from quantkit.data.texts import load_text
from quantkit.errors import RecipeError
from quantkit.evaluation.engine_choice import FP8, REFERENCE, choose, own_device
from quantkit.evaluation.evaluate import LIMITS, measure, open_with_source, prepare
from quantkit.records.recipe import EngineSpec, EvaluationSpec, MemoryLimits, ModelRef, spec_of
from quantkit.records.report import Report
from quantkit.report.statistics import mean_and_error
from quantkit.system.files import temporary_folder
from quantkit.system.progress import Progress

MAX_APART = 0.02  # nats; llama.cpp's 8-bit activations brought 0.013 to a model of 135M parameters with outliers
MAX_SHIFT = 0.01  # nats in the mean: 1 % of the perplexity


@dataclass(frozen=True)
class CrossCheck:
    """Both reports, and the difference (native - reference) of negative log-likelihoods per token, in nats."""

    native: Report
    reference: Report
    shift: float  # mean of the difference
    shift_stderr: float
    apart: float  # half its mean square
    floor: float | None  # the divergence that bfloat16 alone causes

    @property
    def agrees(self) -> bool:
        """Return whether rounding can explain the difference."""
        return self.apart <= MAX_APART and abs(self.shift) - 2 * self.shift_stderr <= MAX_SHIFT

    def lines(self) -> list[str]:
        engine, word = self.native.engine.name, "agree"
        floor = "" if self.floor is None else f"; rounding the source to bfloat16 gives {self.floor:.2g}"
        if not self.agrees:
            word = (
                "DISAGREE beyond rounding: one of them misreads the file, or the engine's arithmetic is this inexact "
                "(try --dtype float32 if the engine supports it)"
            )
        return [
            f"{engine} against reference: log-likelihoods differ by {-self.shift:+.5f} ± {self.shift_stderr:.5f} "
            f"on average; estimated divergence {self.apart:.2g} nats per token{floor}",
            f"{engine} and the reference engine {word}",
        ]


def cross_check(
    model: ModelLike,
    text: str | None = None,
    *,
    source: str | Path | ModelRef | None = None,
    engine: str | EngineSpec | None = None,
    memory: MemoryLimits | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> CrossCheck:
    """Evaluate an artifact with its native engine (or `engine`) and with the reference engine, on the same positions.

    `settings` are fields of EvaluationSpec: protocol, n_ctx, limit. Raises a QuantkitError; RecipeError if no engine
    other than the reference engine loads the artifact.
    """
    spec = spec_of(EvaluationSpec, settings, "evaluation", text=text, probes=("perplexity",))
    opened, exact = open_with_source(model, source)
    native = replace(choose(opened, engine), named=True)  # no fallback to another engine
    if native.name == REFERENCE:
        raise RecipeError(
            f"{opened.label} has no engine here besides the reference engine, so there is nothing to compare"
        )
    cache = FP8 if native.kv_cache == FP8 else None
    ours = choose(opened, EngineSpec(engine=REFERENCE, device=own_device(native.asked_device), kv_cache=cache))
    loaded, limits = load_text(spec.text, "evaluation"), memory or LIMITS
    whole = limits.model_copy(update={"walk": None if limits.walk else limits.walk})
    reports, nlls = [], []
    with temporary_folder() as temp:
        for chosen, limits_of in ((native, whole), (ours, limits)):
            path = temp / f"{chosen.name}.npy"
            evaluation = prepare(opened, spec, loaded, chosen, exact, limits_of)
            reports.append(measure(evaluation, progress or Progress(), path))
            nlls.append(np.load(path, allow_pickle=False)["nll"])
    difference = nlls[0] - nlls[1]
    shift, stderr = mean_and_error(difference)
    floor = None if reports[0].baseline is None else reports[0].baseline.noise
    return CrossCheck(reports[0], reports[1], shift, stderr, float((difference**2).mean()) / 2, floor)
