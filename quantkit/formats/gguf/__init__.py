"""GGUF, the file format of llama.cpp (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

The weights are byte-identical to the output of llama.cpp's converter (to BF16) and `llama_model_quantize`. Not
supported: the TQ types, and architectures that `architectures/known.py` does not list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoints.rows import Rows
from quantkit.contracts.format import Content, Format, Kind, Layout, Loading, TensorWriter
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError
from quantkit.formats.gguf.check_manifest import recorded_options, refuse_tensors
from quantkit.formats.gguf.prepared import prepared
from quantkit.formats.gguf.reader import headers_of, read_file
from quantkit.models.source import Source

if TYPE_CHECKING:
    from quantkit.models.skeleton import Skeleton

USAGE = """
llama.cpp, and tools built on it:

```bash
llama-cli -m FOLDER/{file} -p "Hello"
llama-server -m FOLDER/{file}
```

Python, with `pip install llama-cpp-python`:

```python
from llama_cpp import Llama

print(Llama("FOLDER/{file}")("Hello", max_tokens=32)["choices"][0]["text"])
```
"""


class _Reader:
    def __init__(self, folder: Path, files: tuple[str, ...], _config: dict[str, Any]) -> None:
        self._path = folder / files[0]
        self._tensors = dict(read_file(self._path))

    def names(self) -> list[str]:
        return list(self._tensors)

    def read(self, name: str) -> Rows:
        if name not in self._tensors:
            raise ArtifactError(f"{self._path} lacks the tensor {name}. Convert again with --force.")
        return self._tensors[name]

    def types(self) -> Mapping[str, int]:
        return Counter(tensor.type for header in headers_of(self._path) for tensor in header.tensors)


def _recognizes(path: Path) -> bool:
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    try:
        with files[0].open("rb") as file:
            return file.read(4) == b"GGUF"
    except (OSError, IndexError):
        return False


def _check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked[Layout]:
    from quantkit.formats.gguf.grouped import check

    return check(source, skeleton, layout)


def _write(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> AbstractContextManager[TensorWriter]:
    from quantkit.formats.gguf.grouped import write

    return write(source, skeleton, run, layout)


NOT_IN_VLLM = (
    "vllm-gguf-plugin 0.0.5 has kernels for GPUs only, and computes Llama models wrongly: it does not undo llama.cpp's "
    "order of the rows of queries and keys"
)
FORMAT = Format(
    name="gguf",
    summary="files for llama.cpp: K-quants, Q8_0, F16, BF16, F32",
    reference="https://github.com/ggml-org/ggml/blob/master/docs/gguf.md",
    holds=(Content.GGML_BLOCKS, Content.GROUPED_CODES, Content.MXFP4_VALUES),
    loading={"llamacpp": Loading("0.3.36"), "reference": Loading()},
    kinds=tuple(map(Kind, ("Q2_K_S to Q6_K, IQ1_S to IQ4_NL, auto", "Q4_0", "Q8_0", "MXFP4", "F16", "BF16", "F32"))),
    recognizes=_recognizes,
    open=_Reader,
    check=_check,
    writer=_write,
    weight_files=("*.gguf",),
    refusals=lambda _quantization: {"vllm": NOT_IN_VLLM},
    recorded_options=recorded_options,
    refuse_tensors=refuse_tensors,
    prepared=prepared,
    usage=USAGE,
    library="gguf",
)
