"""LLM.int8 checkpoints as transformers stores them for bitsandbytes, read only.

Per linear layer with weight (N, K): `weight` int8 [N, K], `SCB` float32 [N], the largest value of each row, and
`weight_format`, one uint8, 0 for rows side by side. A value is code times SCB / 127.
Paper: Dettmers et al., LLM.int8(), arXiv:2208.07339 (section 2.1). The values are those of bitsandbytes'
int8_vectorwise_dequant. Not supported: former versions' orders of codes for tensor cores (`weight_format` 1 to 3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.rows import Rows
from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.format import Layout
from quantkit.errors import ArtifactError, UnsupportedError

if TYPE_CHECKING:
    import torch

SCALES, ORDER = "SCB", "weight_format"
STEP = np.float32(1 / 127)
AGAIN = "Fetch the checkpoint again."


class Int8Reader:
    """The tensors of such a checkpoint."""

    def __init__(self, folder: Path, files: tuple[str, ...], _config: dict[str, Any]) -> None:
        self._folder, self._stored = folder, StoredTensors(folder, files)
        known = set(self._stored.names())
        self._layers = {n for n in known if n.endswith(".weight") and self._stored.dtype(n) == "int8"}
        for name in sorted(self._layers):
            self._refuse_parts(name, known)
        for name in sorted(known):
            stem, _, part = name.rpartition(".")
            if part in (SCALES, ORDER) and f"{stem}.weight" not in self._layers:
                raise ArtifactError(f"{folder} has {name} without codes of int8 in {stem}.weight. {AGAIN}")

    def _refuse_parts(self, name: str, known: set[str]) -> None:
        scale, order = (name.removesuffix("weight") + part for part in (SCALES, ORDER))
        if scale not in known:
            raise ArtifactError(f"{self._folder} lacks the tensor {scale}, the scales of {name}. {AGAIN}")
        shape, found, dtype = self._stored.shape(name), self._stored.shape(scale), self._stored.dtype(scale)
        if len(shape) != 2 or 0 in shape or found != shape[:1] or dtype != "float32":
            raise ArtifactError(
                f"{self._folder}: {name} has the shape {shape} and {scale} is {dtype} of the shape {found}; it is "
                f"float32 with one value for each row. {AGAIN}"
            )
        if order in known and not self._in_rows(order):
            raise ArtifactError(
                f"{self._folder}: {order} is not 0: the codes of {name} lie in an order for one kind of card. Load and "
                "save it with bitsandbytes 0.45 or newer."
            )

    def _in_rows(self, order: str) -> bool:
        shape, dtype = self._stored.shape(order), self._stored.dtype(order)
        return shape in ((), (1,)) and dtype == "uint8" and int(self._stored.read(order)) == 0

    def names(self) -> list[str]:
        """The tensors' names in the source."""
        return [name for name in self._stored.names() if name.rpartition(".")[2] not in (SCALES, ORDER)]

    def read(self, name: str) -> torch.Tensor | Rows:
        """One of them: of a layer of codes the values, row by row; raises ArtifactError for scales not finite."""
        if name not in self._layers:
            return self._stored.read(name)
        scale = name.removesuffix("weight") + SCALES
        scales: NDArray[np.float32] = self._stored.read(scale).numpy()
        if not np.isfinite(scales).all():
            raise ArtifactError(f"{self._folder}: the scales {scale} are not finite. {AGAIN}")
        return Rows(self._stored.shape(name), partial(self._dequantized, name, scales))

    def _dequantized(self, name: str, scales: NDArray[np.float32], start: int, stop: int) -> NDArray[np.float32]:
        codes = self._stored.read_rows(name, start, stop).view(np.int8).reshape(stop - start, -1)
        values = codes.astype(np.float32)
        with np.errstate(over="ignore"):
            values *= scales[start:stop, None]
        values *= STEP
        return values

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape (N, K) of a quantized layer's values; None for a dense tensor."""
        return self._stored.shape(name) if name in self._layers else None

    def quantization(self) -> str:
        """What it is called."""
        return "bitsandbytes, LLM.int8"

    def layout(self) -> Layout:
        """There is none in another format."""
        raise UnsupportedError(f"{self._folder} has no grouped codes but those of {self.quantization()}")

    def types(self) -> Mapping[str, int]:
        """Tensors by their type."""
        return Counter(self._stored.dtype(name) for name in self.names())
