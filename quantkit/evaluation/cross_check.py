"""One artifact, two readers: the engine that users run, and our own reader of the same bytes. Do they agree?

Both judge the same positions. Half the mean square of the difference of their log-likelihoods estimates how far apart
their distributions are, in nats, like a divergence. Two right readers differ by rounding: of values to bfloat16 (our
reader) and of activations to 8 bits (llama.cpp, CTranslate2 int8). A reader that takes the file wrongly differs by
more, and so does arithmetic that costs quality: both are worth knowing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.artifact import Artifact
from quantkit.data.texts import load_text
from quantkit.errors import RecipeError
from quantkit.evaluation.engine_choice import choose, own_device
from quantkit.evaluation.evaluate import evaluate_model, open_judged
from quantkit.progress import Progress
from quantkit.recipe import EngineSpec, EvaluationSpec, WalkSpec, parse
from quantkit.report.records import Report
from quantkit.report.statistics import mean_and_error
from quantkit.system.temporary import temporary_folder

REFERENCE = "reference"
MAX_APART = 0.02  # nats; llama.cpp's 8-bit activations brought 0.013 to a model of 135M parameters with outliers
MAX_SHIFT = 0.01  # nats in the mean: 1 % of the perplexity


@dataclass(frozen=True)
class CrossCheck:
    """The reports of both, and the difference native - reference of their negative log-likelihoods, in nats.

    `apart` is half the mean square of the difference, `floor` the divergence that bfloat16 alone brings.
    """

    native: Report
    reference: Report
    shift: float
    shift_stderr: float
    apart: float
    floor: float | None

    @property
    def agrees(self) -> bool:
        """Whether the difference is within what rounding does."""
        return self.apart <= MAX_APART and abs(self.shift) - 2 * self.shift_stderr <= MAX_SHIFT

    def lines(self) -> list[str]:
        """For the screen."""
        engine = self.native.engine.name
        floor = "" if self.floor is None else f"; the source in bfloat16 is {self.floor:.2g} from itself in float32"
        word = (
            "agree"
            if self.agrees
            else (
                "DISAGREE beyond rounding: one of them reads the file wrongly, or the engine's arithmetic costs this "
                "much (look with --dtype float32 where the engine has it)"
            )
        )
        return [
            f"{engine} against our own reader: log-likelihoods differ by {-self.shift:+.5f} ± {self.shift_stderr:.5f} "
            f"in the mean, and the two are about {self.apart:.2g} nats apart{floor}",
            f"{engine} and our own reader {word}",
        ]


def cross_check(
    artifact: str | Path | Artifact,
    text: str | None = None,
    *,
    engine: EngineSpec | None = None,
    revision: str | None = None,
    adapters: Sequence[str | Path] = (),
    source: str | Path | None = None,
    walk: bool | None = None,
    offload_gb: float | None = None,
    max_memory_gb: float | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> CrossCheck:
    """Judge an artifact with its native engine (or `engine`) and with our own reader, on equal positions.

    `settings` are those of an evaluation: protocol, n_ctx, limit. Raises a QuantkitError; RecipeError where there is no
    second engine.
    """
    limits = {"walk": walk, "offload_gb": offload_gb, "max_memory_gb": max_memory_gb}
    memory = parse(WalkSpec, limits, "evaluation")
    spec = parse(EvaluationSpec, {"text": text, **settings, "probes": ("perplexity",)}, "evaluation")
    model, exact = open_judged(artifact, revision, source, adapters)
    native_engine = choose(model, engine or EngineSpec())
    if native_engine.name == REFERENCE:
        raise RecipeError(f"{model.label} has no engine here besides our own reader, so there is nothing to check")
    loaded = load_text(spec.text, "evaluation")
    native_engine = replace(native_engine, named=True)  # it, or nothing
    whole = memory.model_copy(update={"walk": None if memory.walk else memory.walk})
    reports, nlls = [], []
    with temporary_folder() as temp:
        device = own_device(native_engine.asked_device)
        ours = choose(model, EngineSpec(engine=REFERENCE, device=device))
        for chosen, limits_of in ((native_engine, whole), (ours, memory)):
            path = temp / f"{chosen.name}.npy"
            reports.append(evaluate_model(model, spec, loaded, chosen, progress or Progress(), exact, path, limits_of))
            nlls.append(np.load(path, allow_pickle=False)["nll"])
    native, reference = reports
    difference = nlls[0] - nlls[1]
    shift, stderr = mean_and_error(difference)
    floor = None if native.baseline is None else native.baseline.noise
    return CrossCheck(native, reference, shift, stderr, float((difference**2).mean()) / 2, floor)
