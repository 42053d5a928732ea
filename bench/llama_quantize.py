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
    """How many tensors there are, and how many differ in name, type, shape or bytes."""
    from gguf import GGUFReader

    first, second = (GGUFReader(path, "r").tensors for path in (one, other))
    same = sum(
        a.name == b.name and a.tensor_type == b.tensor_type and np.array_equal(a.data, b.data)
        for a, b in zip(first, second, strict=False)
    )
    return {"tensors": len(first), "different": max(len(first), len(second)) - same}


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
