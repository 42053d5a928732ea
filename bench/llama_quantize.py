"""llama.cpp's own quantizer in a process of its own, and a comparison of two files' tensors.

python -m bench.llama_quantize IN.gguf OUT.gguf TYPE [--imatrix FILE] [--threads 1]
python -m bench.llama_quantize --compare ONE.gguf OTHER.gguf
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path

import numpy as np


def quantize(source: Path, out: Path, kind: str, imatrix: Path | None, threads: int) -> int:
    """Run `llama_model_quantize`; its return code."""
    import gguf
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    params.nthread = threads
    if imatrix is not None:
        from quantkit.formats.gguf.imatrix import read_imatrix, without_silent_runs

        # llama.cpp would turn weights to zero whose inputs never fired; both are given the same little importance.
        importance = {
            name: np.concatenate([without_silent_runs(row) for row in values])
            for name, values in read_imatrix(imatrix).items()
        }
        entries = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()
        for entry, (name, values) in zip(entries, importance.items(), strict=False):
            entry.name, entry.size = name.encode(), values.size
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = entries
    return int(llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)))


def compare(one: Path, other: Path) -> dict[str, int]:
    """How many tensors there are, how many differ in name, type, shape or bytes, and in how many blocks those do.

    Blocks are counted of tensors that differ in bytes alone.
    """
    from gguf import GGML_QUANT_SIZES, GGUFReader

    first, second = (GGUFReader(path, "r").tensors for path in (one, other))
    same, blocks, different_blocks = 0, 0, 0
    for a, b in zip(first, second, strict=False):
        if (a.name, a.tensor_type, a.data.shape) != (b.name, b.tensor_type, b.data.shape):
            continue
        _, block_bytes = GGML_QUANT_SIZES[a.tensor_type]
        one_bytes, other_bytes = (data.reshape(-1).view(np.uint8).reshape(-1, block_bytes) for data in (a.data, b.data))
        differing = int((one_bytes != other_bytes).any(axis=1).sum())
        same += differing == 0
        if differing:
            blocks, different_blocks = blocks + len(one_bytes), different_blocks + differing
    return {
        "tensors": len(first),
        "different": max(len(first), len(second)) - same,
        "blocks": blocks,
        "different_blocks": different_blocks,
    }


def main() -> int:
    """Quantize or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs=2)
    parser.add_argument("kind", nargs="?", default="")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    if asked.compare:
        print(json.dumps(compare(*asked.files)))
        return 0
    return quantize(*asked.files, asked.kind, asked.imatrix, asked.threads)


if __name__ == "__main__":
    raise SystemExit(main())
