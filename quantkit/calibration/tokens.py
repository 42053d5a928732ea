"""The token ids that a model is calibrated on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quantkit.artifact import CalibrationEntry
from quantkit.contracts.method import CalibrationTokens, Job
from quantkit.data.texts import encode, load_text
from quantkit.errors import TextError
from quantkit.models.config import note_beyond_context, refuse_ids
from quantkit.recipe import CalibrationSpec
from quantkit.system.memory import trim_heap


def tokens_of(job: Job) -> CalibrationTokens:
    """The job's tokens; drawn here where its check has not drawn them."""
    source, recipe = job.source, job.recipe
    return job.calibration or draw_tokens(source.tokenizer(), recipe.calibration, recipe.seed, source.config)


def context_notes(spec: CalibrationSpec, config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a user should know of sequences beyond the model's context; raises UnsupportedError where it has none."""
    note = note_beyond_context(config, spec.length, "calibration sequences")
    return () if note is None else (note,)


def draw_tokens(
    tokenizer: Any, spec: CalibrationSpec, seed: int, config: Mapping[str, Any] | None = None
) -> CalibrationTokens:
    """Draw sequences from the calibration text's pieces by `seed`, for the model of a config.json.

    Raises TextError where the user's own text is too short (the bundled sample gives as many as it has), SourceError
    and UnsupportedError where the model has no embedding for a token or a position.
    """
    context_notes(spec, config or {})
    text = load_text(spec.text, "calibration")
    ids = encode(tokenizer, text.content)
    refuse_ids(config or {}, ids, text.name)
    trim_heap()  # the tokenizer needs some hundred bytes a token
    have = len(ids) // spec.length
    if have < spec.sequences and not (text.bundled and have):
        raise TextError(
            f"the calibration text {text.name} is too short: {len(ids)} tokens hold {have} of the asked "
            f"{spec.sequences} sequences of {spec.length}. Give a longer text or fewer sequences."
        )
    count = min(have, spec.sequences)
    chosen = np.sort(np.random.default_rng(seed).permutation(have)[:count])
    entry = CalibrationEntry(
        text=text.name, sha256=text.sha256, sequences=count, length=spec.length, requested=spec.sequences
    )
    return CalibrationTokens(ids[: have * spec.length].reshape(have, spec.length)[chosen], entry)
