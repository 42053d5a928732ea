"""What the engines' scripts share: their arguments, and how log-probabilities are written.

`whole` keeps all of them, (T, V) float32; `some` keeps those of the tokens that an engine tells, as JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    """The command line of every script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="artifact or checkpoint folder")
    parser.add_argument("--prompt", type=Path, required=True, help="JSON: list of token ids")
    parser.add_argument("--out", type=Path, required=True, help="file to write: .npy (whole) or .json (some)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def prompt_ids(asked: argparse.Namespace) -> list[int]:
    """The prompt."""
    found: list[int] = json.loads(asked.prompt.read_text(encoding="utf-8"))
    return found


def whole(asked: argparse.Namespace, logits: Any) -> None:
    """Write the log-probabilities of logits (T, V), without the last position's."""
    import numpy as np
    import torch

    values = torch.as_tensor(logits)[:-1].float().log_softmax(-1)
    np.save(asked.out, values.detach().numpy())


def some(asked: argparse.Namespace, positions: list[dict[int, float]]) -> None:
    """Write token id -> log-probability of each position but the last."""
    asked.out.write_text(json.dumps(positions), encoding="utf-8")
