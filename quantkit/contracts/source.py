"""What an opened source must provide: a read-only checkpoint whose tensors are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.rows import Rows
from quantkit.checkpoints.safetensors import TensorInfo

if TYPE_CHECKING:
    import torch


class Source(Protocol):
    """`config` is config.json as a dict, `tensors` what is known of each tensor without reading it."""

    folder: Path
    model: str
    revision: str | None
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def name(self) -> str:
        """What the model is called, without a place: ``demo``, the hub id, or the folder's name."""

    @property
    def architecture(self) -> str:
        """The `model_type` of the configuration, such as ``llama``."""

    @property
    def parameters(self) -> int:
        """Number of stored weights."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files."""

    @property
    def weight_files(self) -> list[str]:
        """Names of the weight files."""

    @property
    def settings(self) -> Any:
        """config.json as the configuration of transformers; raises UnsupportedError."""

    @property
    def hashes(self) -> dict[str, str]:
        """sha256 of the configuration and of every weight file, by file name."""

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype and shape; raises SourceError for an unknown name."""

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start:stop` of one tensor."""

    def select_rows(self, name: str, rows: list[int]) -> torch.Tensor:
        """The given rows of one tensor, (len(rows), ...)."""

    def stored(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Rows of a tensor of floats as numpy has them (checkpoints/floats.py)."""

    def floats(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """What `stored` gives, in float32."""

    def in_rows(self, name: str) -> Rows:
        """A tensor of floats, each of its rows read when it is asked for."""

    def refuse_non_finite(self, tell: Callable[[str, int], None] = ...) -> None:
        """Read every float tensor; raises SourceError at the first NaN or infinity."""

    def copy_side_files(self, folder: Path) -> None:
        """Copy tokenizer, chat template, generation config and licence."""

    def tokenizer(self) -> Any:
        """The tokenizer of transformers; raises SourceError."""
