"""What a checkpoint keeps of its original, bit by bit: tensors beside the model, and config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.journal import CHUNK
from quantkit.checkpoints.safetensors import TensorInfo


class Original(Protocol):
    """What a checkpoint is made from: its config.json, its names, and the tensors that are kept as they are."""

    kept: Mapping[str, str]

    @property
    def whole_config(self) -> dict[str, Any]:
        """config.json."""

    def published(self, name: str) -> str:
        """What the checkpoint calls a tensor."""

    def kept_info(self, name: str) -> TensorInfo:
        """What is known of a kept tensor."""

    def read_kept(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of some of its rows."""


def kept_pieces(original: Original, name: str) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a kept tensor, some rows at a time."""
    info = original.kept_info(name)
    rows = info.shape[0] if info.shape else 1
    step = max(1, rows * CHUNK // max(info.nbytes, 1))
    for start in range(0, rows, step):
        yield np.ascontiguousarray(original.read_kept(name, start, min(start + step, rows)))
