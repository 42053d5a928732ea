"""What the workers share: their arguments and what they print. Uses only Python's own library and torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
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
    processor = getattr(torch.cpu, "get_capabilities", dict)()
    only_avx512 = str(processor.get("cpu_name", "")).startswith("Intel") and not processor.get("amx_bf16", False)
    if only_avx512 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        _multiply_in_float32()
    return parsed


def _multiply_in_float32() -> None:
    """Let linear layers and attention of half-size floats multiply in float32, and round once.

    Without units for bfloat16 a processor takes about seven times as long for it, and one of Intel's without AMX 1.6
    times; no peer knows that by itself.
    """
    import torch

    torch.nn.functional.linear = _widened(torch.nn.functional.linear)
    torch.matmul = _widened(torch.matmul)


def _widened(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain` of tensors, all of bfloat16 or all of float16, by way of float32."""

    def multiply(*tensors: Any, **named: Any) -> Any:
        given = tensors[0].dtype
        if named or given.itemsize != 2 or any(other is not None and other.dtype != given for other in tensors):
            return plain(*tensors, **named)
        return plain(*(None if one is None else one.float() for one in tensors)).to(given)

    return multiply


def token_lists(path: Path) -> list[list[int]]:
    """The calibration sequences."""
    found: list[list[int]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def tell(*packages: str, **remarks: object) -> None:
    """Print the result as the last line of the output: versions of `packages`, and remarks."""
    versions = {name: version(name) for name in (*packages, "torch", "transformers")}
    print("\n" + json.dumps({"versions": versions, **remarks}), flush=True)
