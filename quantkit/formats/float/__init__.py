"""Plain checkpoints: every tensor a float, in safetensors. What Hugging Face models are published as."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoints.safetensors import DTYPES
from quantkit.contracts.format import Format, Kind, Layout, TensorWriter, Written
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError, QuantkitError, SourceError, UnsupportedError
from quantkit.formats._quantization_config import dtype_of, refuse_other_dtypes
from quantkit.models.source import Source

if TYPE_CHECKING:
    from quantkit.artifact import Artifact
    from quantkit.checkpoints.rows import Rows
    from quantkit.models.skeleton import Skeleton

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
PIECE = 1 << 20  # values that are in memory at a time


class _Reader:
    def __init__(self, folder: Path, files: tuple[str, ...], _config: dict[str, Any]) -> None:
        from quantkit.formats.float.checkpoint import Checkpoint, read_plain

        try:
            _, tensors = read_plain(folder, str(folder))
            self._checkpoint = Checkpoint(folder, str(folder), None, {}, tensors)
        except (SourceError, UnsupportedError, OSError) as error:
            raise ArtifactError(f"{folder} cannot be read: {str(error).rstrip('.')}. Convert again.") from None
        if set(self._checkpoint.weight_files) != set(files):
            raise ArtifactError(f"{folder} has other weight files than {', '.join(files)}. Convert again.")

    def names(self) -> list[str]:
        """The tensors' names."""
        return sorted(self._checkpoint.tensors)

    def read(self, name: str) -> Rows:
        """One of them, row by row."""
        return self._checkpoint.in_rows(name)

    def types(self) -> Mapping[str, int]:
        """Tensors by their type."""
        return Counter(DTYPES[info.dtype] for info in self._checkpoint.tensors.values())


class _Writer(TensorWriter):
    dtype = "float16"

    def add(self, name: str, value: Written) -> None:
        """Take a dense tensor, some rows at a time where it comes in rows, and round it to the layout's dtype."""
        import torch

        from quantkit.checkpoints.rows import Rows, rows_in_memory
        from quantkit.numerics.casting import cast_finite

        rows = rows_in_memory(value) if isinstance(value, torch.Tensor) else value
        if not isinstance(rows, Rows):
            return super().add(name, value)
        dtype, what = getattr(torch, self.dtype), f"{name} of {self.source.model}"
        pieces = (cast_finite(torch.from_numpy(piece), dtype, what) for _, piece in rows.pieces(PIECE))
        self.checkpoint.add_pieces(name, dtype, rows.shape, pieces)
        self.run.findings.count(self.dtype)


def _check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked:
    from quantkit.models.skeleton import refuse_shapes

    refuse_shapes(source, skeleton)
    return Checked(source.parameters * ITEM_BYTES[layout.dtype] + 50_000_000, plan=layout)


@contextmanager
def _write(source: Source, _skeleton: Skeleton, run: Run, layout: Layout) -> Iterator[_Writer]:
    from quantkit.checkpoints.writer import open_writer

    with open_writer(run.folder, source, layout.dtype, None) as checkpoint:
        writer = _Writer(checkpoint, source, run)
        writer.dtype = layout.dtype
        yield writer


def _tells(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    dtype = dtype_of(artifact.folder)
    refuse_other_dtypes(artifact.folder, dtype, artifact.manifest.tensor_types)
    return {"bits": (dtype,)}


def _recognizes(path: Path) -> bool:
    from quantkit.formats.float.checkpoint import read_plain

    try:
        read_plain(path, str(path))
    except (QuantkitError, OSError):
        return False
    return True


FORMAT = Format(
    name="float",
    summary="plain safetensors of floats",
    reference="https://github.com/huggingface/safetensors",
    holds=("floats",),
    engines=("transformers", "reference", "vllm"),
    kinds=(Kind("float16"), Kind("bfloat16"), Kind("float32")),
    since={"reference": "", "transformers": "5.23", "vllm": "0.32"},
    servers={"sglang": "", "tgi": "", "exllama": ""},
    recognizes=_recognizes,
    open=_Reader,
    check=_check,
    writer=_write,
    tells=_tells,
)
