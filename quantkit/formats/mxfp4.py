"""MXFP4 checkpoints in gpt-oss's layout (transformers' `Mxfp4Config`), as sources only.

A stack NAME of E experts is stored as NAME_blocks uint8 [E, N, K/32, 16], two 4-bit codes (E2M1) per byte, first one
low, and NAME_scales uint8 [E, N, K/32], powers of two (E8M0). It is read in transformers' shape (E, K, N). Others are
dense. Format: OCP Microscaling Formats (MX) Specification 1.0; values: transformers' integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.contracts.format import Format, Kind, Loading
from quantkit.errors import ArtifactError
from quantkit.formats._packed_layers import RowsReader
from quantkit.formats._quantization_config import recognizes
from quantkit.numerics.quantized_weight import E2M1_CODES

AGAIN = "Fetch the checkpoint again."
BLOCKS, SCALES = "_blocks", "_scales"
RUN_BYTES = 16  # bytes of codes per scale
SCALE_TYPES = ("uint8", "float8_e8m0fnu")
E2M1 = np.array(E2M1_CODES, np.float32)
PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], -1)  # the two values of a byte


class _Reader(RowsReader):
    called = "mxfp4"

    def __init__(self, folder: Path, files: tuple[str, ...], _config: dict[str, Any]) -> None:
        super().__init__(folder, files)
        stacks = [name.removesuffix(BLOCKS) for name in sorted(self.known) if name.endswith(BLOCKS)]
        self.shapes = {name: self._shape_of(name) for name in stacks}
        self.scale_names = {name + part for name in stacks for part in (BLOCKS, SCALES)}
        for name in sorted(self.known):
            if name.endswith(SCALES) and name not in self.scale_names:
                raise ArtifactError(f"{folder} lacks the tensor {name.removesuffix(SCALES)}{BLOCKS}. {AGAIN}")

    def _shape_of(self, name: str) -> tuple[int, ...]:
        """Return the dequantized shape (E, K, N) of a stack, after checking its two tensors."""
        if name + SCALES not in self.known:
            raise ArtifactError(f"{self.folder} lacks the tensor {name}{SCALES}, the scales of {name}{BLOCKS}. {AGAIN}")
        if name in self.known:
            raise ArtifactError(f"{self.folder} has {name} twice, in floats and as {name}{BLOCKS}. {AGAIN}")
        blocks, scales = (self.stored.shape(name + part) for part in (BLOCKS, SCALES))
        kinds = [self.stored.dtype(name + part) for part in (BLOCKS, SCALES)]
        if len(blocks) != 4 or 0 in blocks or blocks != (*scales, RUN_BYTES):
            raise ArtifactError(
                f"{self.folder}: {name}{BLOCKS} and {name}{SCALES} have the shapes {blocks} and {scales}, not "
                f"(experts, N, K/32, {RUN_BYTES}) and (experts, N, K/32). {AGAIN}"
            )
        if kinds[0] != "uint8" or kinds[1] not in SCALE_TYPES:
            raise ArtifactError(
                f"{self.folder}: {name}{BLOCKS} and {name}{SCALES} are {kinds[0]} and {kinds[1]}, not uint8. {AGAIN}"
            )
        return scales[0], scales[2] * 2 * RUN_BYTES, scales[1]

    def dequantizer(self, name: str) -> Callable[[int, int], NDArray[np.float32]]:
        scales = self.stored.read(name + SCALES).view(torch.float8_e8m0fnu).float().numpy()
        if not np.isfinite(scales).all():
            raise ArtifactError(f"{self.folder}: the scales {name}{SCALES} are not finite. {AGAIN}")
        return partial(self._dequantized, name, scales)

    def _dequantized(self, name: str, scales: NDArray[np.float32], start: int, stop: int) -> NDArray[np.float32]:
        codes, factors = self.stored.read_rows(name + BLOCKS, start, stop), scales[start:stop, ..., None]
        values: NDArray[np.float32] = PAIRS[codes].reshape(*factors.shape[:-1], 2 * RUN_BYTES)
        with np.errstate(over="ignore"):
            values *= factors
        return values.reshape(*values.shape[:2], -1).transpose(0, 2, 1)

    def type_of(self, name: str) -> str:
        return "mxfp4" if name in self.shapes else super().type_of(name)


FORMAT = Format(
    name="mxfp4",
    summary="4-bit floats with a power of two per 32 values, as in gpt-oss; source only",
    reference="https://huggingface.co/docs/transformers/quantization/mxfp4",
    holds=(),
    loading={"reference": Loading(), "transformers": Loading("5.23")},
    recognizes=partial(recognizes, "mxfp4"),
    open=_Reader,
    open_quantized=_Reader,
    kinds=(Kind("4", "E2M1, a source only"),),
    refusals=lambda _quantization: {"vllm": "it was not tested with vLLM"},
)
