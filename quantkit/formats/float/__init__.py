"""Plain checkpoints: every tensor a float, in safetensors. What Hugging Face models are published as."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoints.rows import Rows
from quantkit.contracts.format import Format, Layout, Written
from quantkit.contracts.run import Checked, Findings, Run
from quantkit.contracts.source import Source
from quantkit.errors import SourceError

if TYPE_CHECKING:
    import torch

    from quantkit.checkpoints.writer import CheckpointWriter
    from quantkit.models.skeleton import Skeleton
    from quantkit.numerics.grouped_weight import GroupedWeight

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


class _Writer:
    finished = 0

    def __init__(self, writer: CheckpointWriter, source: Source, run: Run, dtype: str) -> None:
        self._writer, self._source, self._run, self._dtype = writer, source, run, dtype

    def add(self, name: str, value: Written) -> None:
        """Take a dense tensor, some rows at a time where it comes in rows, and round it to the layout's dtype."""
        import torch

        from quantkit.numerics.casting import cast_finite

        dtype, what = getattr(torch, self._dtype), f"{name} of {self._source.model}"
        if isinstance(value, Rows):
            pieces = (cast_finite(torch.from_numpy(piece), dtype, what) for _, piece in value.pieces(PIECE))
            self._writer.add_pieces(name, dtype, value.shape, pieces)
        elif isinstance(value, torch.Tensor):
            self._writer.add(name, cast_finite(value, dtype, what))
        else:
            raise TypeError(f"{name}: a plain checkpoint holds floats, not {type(value).__name__}")
        self._run.findings.count(self._dtype)

    def block(self, _prefix: str) -> dict[str, torch.Tensor | GroupedWeight]:
        """Nothing: there are no codes to go on from."""
        return {}

    def replace_scales(self, name: str, _scales: torch.Tensor) -> None:
        """Floats have no scales."""
        raise TypeError(f"{name} has no scales")

    def finish_block(self, index: int, findings: Findings) -> None:
        """Make the work so far survive the end of the process."""
        self._writer.finish_block(index, findings.to_values())


def _check(source: Source, _skeleton: Skeleton, layout: Layout) -> Checked:
    return Checked(source.parameters * ITEM_BYTES[layout.dtype] + 50_000_000, plan=layout)


@contextmanager
def _write(source: Source, _skeleton: Skeleton, run: Run, layout: Layout) -> Iterator[_Writer]:
    from quantkit.checkpoints.writer import open_writer

    with open_writer(run.folder, source.config, layout.dtype, None) as checkpoint:
        yield _Writer(checkpoint, source, run, layout.dtype)


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
