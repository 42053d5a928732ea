"""Calibration tokens: draw them from a text, and detect passages that an evaluation text shares with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quantkit.contracts.engine import Window
from quantkit.contracts.method import CalibrationTokens, CheckedJob
from quantkit.data.chat import plain_texts
from quantkit.data.passages import WORDS, seen_in, sketch_of
from quantkit.data.texts import Text, ids_of, load_text
from quantkit.errors import TextError
from quantkit.models.config import note_beyond_context, refuse_ids
from quantkit.records.artifact import CalibrationEntry
from quantkit.records.recipe import CalibrationSpec
from quantkit.system.memory import trim_heap


def tokens_of(job: CheckedJob) -> CalibrationTokens:
    """Return the job's calibration tokens; draw them if its check has not done so."""
    source, recipe = job.source, job.recipe
    return job.calibration or draw_tokens(source.tokenizer(), recipe.calibration, recipe.seed, source.config)


def context_notes(spec: CalibrationSpec, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note if sequences exceed the model's context; raises UnsupportedError if it has no such positions."""
    note = note_beyond_context(config, spec.length, "calibration sequences")
    return () if note is None else (note,)


def draw_tokens(
    tokenizer: Any, spec: CalibrationSpec, seed: int, config: Mapping[str, Any] | None = None
) -> CalibrationTokens:
    """Cut the calibration text into sequences and draw some of them by `seed`; `config` is the model's config.json.

    Raises TextError if the user's own text is too short (the bundled sample may give fewer sequences), SourceError or
    UnsupportedError if the model has no embedding for a token or a position.
    """
    context_notes(spec, config or {})
    text = load_text(spec.text, "calibration")
    ids = ids_of(tokenizer, text)
    refuse_ids(config or {}, ids, text.name)
    trim_heap()  # the tokenizer needs some hundred bytes per token
    have = len(ids) // spec.length
    if have < spec.sequences and not (text.bundled and have):
        raise TextError(
            f"the calibration text {text.name} is too short: {len(ids)} tokens, enough for {have} of "
            f"{spec.sequences} sequences of {spec.length}. Give a longer text or {'fewer' if have else 'shorter'} "
            "sequences."
        )
    count = min(have, spec.sequences)
    chosen = np.sort(np.random.default_rng(seed).permutation(have)[:count])
    rows = ids[: have * spec.length].reshape(have, spec.length)[chosen]
    entry = CalibrationEntry(
        text=text.name, sha256=text.sha256, sequences=count, length=spec.length, requested=spec.sequences,
        passages=sketch_of(_decoded(tokenizer, row) for row in rows),
    )  # fmt: skip
    return CalibrationTokens(rows, entry)


def _decoded(tokenizer: Any, ids: np.ndarray) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))


FLATTERS = "figures on text that a method has seen look too good"
LEAST_SEEN, LEAST_SHARE = 3, 0.005  # of sampled passages; fewer may be common phrases


def seen_notes(
    entry: CalibrationEntry | None, text: Text, windows: Sequence[Window], tokenizer: Any
) -> tuple[str, ...]:
    """Return a note if the evaluation `windows` share passages with an artifact's calibration text.

    Of conversations only the messages are compared, not the chat template. If the manifest has no passages, the note
    only reports an identical text.
    """
    if entry is None:
        return ()
    same = f"calibrated on the evaluation text, sha256 {text.sha256[:12]}" if entry.sha256 == text.sha256 else ""
    if not entry.passages:
        return (f"{same}: {FLATTERS}",) if same else ()
    among = plain_texts(text.parts) if text.parts else None
    found = seen_in(entry.passages, (_decoded(tokenizer, window.ids) for window in windows), among)
    if found.seen < LEAST_SEEN or found.share < LEAST_SHARE:
        return (f"{same}, but on other parts of it",) if same else ()
    share = f"about {found.share:.0%} of the evaluated passages of {WORDS} words were in its calibration sequences"
    return (f"{same or 'evaluated on text that it was calibrated on'}: {share}; {FLATTERS}",)
