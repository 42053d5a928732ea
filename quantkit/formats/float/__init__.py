"""Plain checkpoints: every tensor a float, in safetensors. What Hugging Face models are published as."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.contracts.format import Format, Layout, TensorWriter, Written
from quantkit.contracts.run import Checked, Run
from quantkit.errors import SourceError
from quantkit.models.source import Source

if TYPE_CHECKING:
    from quantkit.checkpoints.rows import Rows
    from quantkit.models.skeleton import Skeleton

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
PIECE = 1 << 20  # values that are in memory at a time


class _Reader:
    def __init__(self, folder: Path, _files: tuple[str, ...], _config: dict[str, Any]) -> None:
        from quantkit.formats.float.checkpoint import open_checkpoint

        self._checkpoint = open_checkpoint(folder, str(folder))

    def names(self) -> list[str]:
        """The tensors' names."""
        return sorted(self._checkpoint.tensors)

    def read(self, name: str) -> Rows:
        """One of them, row by row."""
        return self._checkpoint.in_rows(name)


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

    with open_writer(run.folder, source.config, layout.dtype, None) as checkpoint:
        writer = _Writer(checkpoint, source, run)
        writer.dtype = layout.dtype
        yield writer


def _recognizes(path: Path) -> bool:
    from quantkit.formats.float.checkpoint import open_checkpoint

    try:
        open_checkpoint(path, str(path))
    except (SourceError, OSError):
        return False
    return True


FORMAT = Format(
    name="float",
    summary="plain safetensors of floats",
    reference="https://github.com/huggingface/safetensors",
    holds=("floats",),
    engines=("transformers", "reference", "vllm"),
    recognizes=_recognizes,
    open=_Reader,
    check=_check,
    writer=_write,
)
