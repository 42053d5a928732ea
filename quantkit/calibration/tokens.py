"""The token ids that a model is calibrated on."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.data.texts import encode, load_text
from quantkit.errors import TextError
from quantkit.recipe import CalibrationSpec
from quantkit.system.memory import give_back_freed


def calibration_tokens(tokenizer: Any, spec: CalibrationSpec, seed: int) -> tuple[np.ndarray, str]:
    """Draw (sequences, length) int64 ids from the calibration text's pieces by `seed`; also return a remark.

    Raises TextError where the user's own text is too short; the bundled sample gives as many as it has.
    """
    text = load_text(spec.text, "calibration")
    ids = encode(tokenizer, text.content)
    give_back_freed()  # the tokenizer needs some hundred bytes a token
    have = len(ids) // spec.length
    if have < spec.sequences and not (text.bundled and have):
        raise TextError(
            f"the calibration text {text.name} is too short: {len(ids)} tokens hold {have} of the asked "
            f"{spec.sequences} sequences of {spec.length}. Give a longer text or fewer sequences."
        )
    count = min(have, spec.sequences)
    asked = "" if count == spec.sequences else f" (asked: {spec.sequences}; it holds no more)"
    remark = f"calibrated on {count} sequences of {spec.length} tokens{asked} of {text.name}, sha256 {text.sha256[:12]}"
    chosen = np.sort(np.random.default_rng(seed).permutation(have)[:count])
    return ids[: have * spec.length].reshape(have, spec.length)[chosen], remark
