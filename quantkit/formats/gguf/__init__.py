"""GGUF: the files of llama.cpp and of everything built on it.

What is written is byte for byte what llama.cpp's own converter (to BF16) and `llama_model_quantize` write for the
weights. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

Not supported: TQ types, architectures that `architectures/known.py` does not list.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoints.rows import Rows
from quantkit.contracts.format import Content, Format, Kind, Layout, Loading, TensorWriter
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError

if TYPE_CHECKING:
    from quantkit.artifact import Artifact
    from quantkit.models.skeleton import Skeleton
    from quantkit.models.source import Source

USAGE = """
llama.cpp, and what is built on it:

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
        from quantkit.formats.gguf.reader import read_file

        self._path = folder / files[0]
        self._tensors = dict(read_file(self._path))

    def names(self) -> list[str]:
        return list(self._tensors)

    def read(self, name: str) -> Rows:
        if name not in self._tensors:
            raise ArtifactError(f"{self._path} lacks the tensor {name}. Convert again with --force.")
        return self._tensors[name]

    def types(self) -> Mapping[str, int]:
        from quantkit.formats.gguf.check_manifest import types_of

        return types_of(self._path)


def _recognizes(path: Path) -> bool:
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    try:
        with files[0].open("rb") as file:
            return file.read(4) == b"GGUF"
    except (OSError, IndexError):
        return False


def _tells(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    from quantkit.formats.gguf.check_manifest import recorded_options

    return recorded_options(artifact)


def _refuse_tensors(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    from quantkit.formats.gguf.check_manifest import refuse_tensors

    refuse_tensors(config, shapes)


def _check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked:
    from quantkit.formats.gguf.grouped import check

    return check(source, skeleton, layout)


def _write(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> AbstractContextManager[TensorWriter]:
    from quantkit.formats.gguf.grouped import write

    return write(source, skeleton, run, layout)


def _prepared(source: Source) -> Source:
    from quantkit.formats.gguf.prepared import prepared

    return prepared(source)


FORMAT = Format(
    name="gguf",
    summary="files for llama.cpp: K-quants, Q8_0, F16, BF16, F32",
    reference="https://github.com/ggml-org/ggml/blob/master/docs/gguf.md",
    holds=(Content.GGML_BLOCKS, Content.GROUPED_CODES, Content.MXFP4_VALUES),
    loading={"llamacpp": Loading("0.3.36"), "reference": Loading()},
    kinds=(
        Kind("Q2_K_S to Q6_K, IQ1_S to IQ4_NL, auto"),
        Kind("Q4_0"),
        Kind("Q8_0"),
        Kind("MXFP4"),
        Kind("F16"),
        Kind("BF16"),
        Kind("F32"),
    ),
    recognizes=_recognizes,
    open=_Reader,
    check=_check,
    writer=_write,
    weight_files=("*.gguf",),
    recorded_options=_tells,
    refuse_tensors=_refuse_tensors,
    prepared=_prepared,
    usage=USAGE,
    library="gguf",
)
