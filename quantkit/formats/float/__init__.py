"""Plain checkpoints: every tensor a float, in safetensors. What Hugging Face models are published as."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.contracts.format import Format
from quantkit.errors import SourceError

if TYPE_CHECKING:
    from quantkit.checkpoints.rows import Rows


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
    engines=("transformers", "reference", "vllm"),
    recognizes=_recognizes,
    open=_Reader,
)
