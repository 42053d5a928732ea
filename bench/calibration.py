"""The calibration tokens, drawn once by quantkit and written to a file, so that every tool sees the same ones.

python -m bench.calibration MODEL_FOLDER SEQUENCES LENGTH
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.folders import calibration_text, work_folder
from quantkit.calibration.tokens import draw_tokens
from quantkit.models.config import load_tokenizer
from quantkit.records.recipe import CalibrationSpec

SEED = 0


def calibration_file(model: Path, sequences: int, length: int) -> Path:
    """A JSON list of `sequences` lists of `length` token ids for the tokenizer of `model`."""
    path = work_folder() / f"calibration-{model.name}-{sequences}x{length}.json"
    if not path.is_file():
        spec = CalibrationSpec(text=str(calibration_text()), sequences=sequences, length=length)
        ids = draw_tokens(load_tokenizer(model), spec, SEED).ids
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ids.tolist()), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(calibration_file(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
