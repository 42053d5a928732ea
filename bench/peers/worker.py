"""What the workers share: their arguments and what they print. Uses only Python's own library and torch."""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    """The command line of every worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the quantized model")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--asym", action="store_true", help="zero points; default: a symmetric grid")
    parser.add_argument("--calibration", type=Path, required=True, help="JSON: list of lists of token ids")
    parser.add_argument("--threads", type=int, default=1)
    parsed = parser.parse_args()
    import torch

    torch.set_num_threads(parsed.threads)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        _multiply_in_float32()
    return parsed


def _multiply_in_float32() -> None:
    """Let linear layers of half-size floats multiply in float32, and round once.

    Without units for bfloat16 a processor takes about seven times as long for it; no peer knows that by itself.
    """
    import torch

    plain = torch.nn.functional.linear

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        if x.dtype == torch.float32 or weight.dtype == torch.float32:
            return plain(x, weight, bias)
        return plain(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    torch.nn.functional.linear = linear


def token_lists(path: Path) -> list[list[int]]:
    """The calibration sequences."""
    found: list[list[int]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def tell(*packages: str, **remarks: object) -> None:
    """Print the result as the last line of the output: versions of `packages`, and remarks."""
    versions = {name: version(name) for name in (*packages, "torch", "transformers")}
    print("\n" + json.dumps({"versions": versions, **remarks}), flush=True)
