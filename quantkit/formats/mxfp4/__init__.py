"""MXFP4 checkpoints as gpt-oss is published and transformers' `Mxfp4Config` reads them: sources only.

A stack NAME of E experts' matrices lies as NAME_blocks uint8 [E, N, K/32, 16], two codes of 4 bits (E2M1) a byte, the
first one low, and NAME_scales uint8 [E, N, K/32], powers of two (E8M0). transformers keeps it the other way round, and
so it is read: (E, K, N). All else is dense.
Format: OCP Microscaling Formats (MX) Specification, version 1.0. The values are those of transformers'
integrations/mxfp4.py.
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
from quantkit.contracts.format import Format, Kind, Layout
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats._quantization_config import recognizes
from quantkit.formats._small_floats import E2M1, E8M0, exponents

if TYPE_CHECKING:
    import torch

AGAIN = "Fetch the checkpoint again."
BLOCKS, SCALES = "_blocks", "_scales"
RUN_BYTES = 16  # of the codes that share a scale
SCALE_TYPES = ("uint8", "float8_e8m0fnu")
PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], -1)  # the two values of a byte


class _Reader:
    def __init__(self, folder: Path, files: tuple[str, ...], _config: dict[str, Any]) -> None:
        self._folder, self._stored = folder, StoredTensors(folder, files)
        known = set(self._stored.names())
        self._stacks = {name.removesuffix(BLOCKS) for name in known if name.endswith(BLOCKS)}
        for name in sorted(self._stacks):
            self._refuse_parts(name, known)
        for name in sorted(known):
            if name.endswith(SCALES) and name.removesuffix(SCALES) not in self._stacks:
                raise ArtifactError(f"{folder} lacks the tensor {name.removesuffix(SCALES)}{BLOCKS}. {AGAIN}")

    def _refuse_parts(self, name: str, known: set[str]) -> None:
        if name + SCALES not in known:
            raise ArtifactError(
                f"{self._folder} lacks the tensor {name}{SCALES}, the scales of {name}{BLOCKS}. {AGAIN}"
            )
        if name in known:
            raise ArtifactError(f"{self._folder} holds {name} twice, as it is and as {name}{BLOCKS}. {AGAIN}")
        shapes = [self._stored.shape(name + part) for part in (BLOCKS, SCALES)]
        kinds = [self._stored.dtype(name + part) for part in (BLOCKS, SCALES)]
        if len(shapes[0]) != 4 or 0 in shapes[0] or shapes[0] != (*shapes[1], RUN_BYTES):
            raise ArtifactError(
                f"{self._folder}: {name}{BLOCKS} and {name}{SCALES} have the shapes {shapes[0]} and {shapes[1]}, not "
                f"(experts, N, K/32, {RUN_BYTES}) and (experts, N, K/32). {AGAIN}"
            )
        if kinds[0] != "uint8" or kinds[1] not in SCALE_TYPES:
            raise ArtifactError(
                f"{self._folder}: {name}{BLOCKS} and {name}{SCALES} are {kinds[0]} and {kinds[1]}, not uint8. {AGAIN}"
            )

    def names(self) -> list[str]:
        """The tensors' names in the source."""
        parts = {name + part for name in self._stacks for part in (BLOCKS, SCALES)}
        return sorted({*self._stored.names(), *self._stacks} - parts)

    def read(self, name: str) -> torch.Tensor | Rows:
        """One of them: of a stack the values, expert by expert; raises ArtifactError for scales that are NaN."""
        shape = self.quantized_shape(name)
        if shape is None:
            return self._stored.read(name)
        stored = name + SCALES
        scales = self._stored.read_rows(stored, 0, shape[0]).reshape(self._stored.shape(stored))
        if (scales == len(E8M0) - 1).any():
            raise ArtifactError(f"{self._folder}: the scales {stored} are not finite. {AGAIN}")
        return Rows(shape, partial(self._dequantized, name, scales))

    def _dequantized(self, name: str, scales: NDArray[np.uint8], start: int, stop: int) -> NDArray[np.float32]:
        codes = self._stored.read_rows(name + BLOCKS, start, stop)
        values: NDArray[np.float32] = PAIRS[codes].reshape(*scales[start:stop].shape, 2 * RUN_BYTES)
        with np.errstate(over="ignore"):
            values *= exponents(scales[start:stop])[..., None]
        return values.reshape(*values.shape[:2], -1).transpose(0, 2, 1)

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape (E, K, N) of a stack's values; None for a dense tensor."""
        if name not in self._stacks:
            return None
        experts, rows, runs = self._stored.shape(name + SCALES)
        return experts, runs * 2 * RUN_BYTES, rows

    def quantization(self) -> str:
        """What it is called."""
        return "mxfp4"

    def layout(self) -> Layout:
        """There is none in another format."""
        raise UnsupportedError(f"{self._folder} has no grouped codes but {self.quantization()}")

    def types(self) -> Mapping[str, int]:
        """Stacks, and dense tensors by their type."""
        return Counter("mxfp4" if name in self._stacks else self._stored.dtype(name) for name in self.names())


FORMAT = Format(
    name="mxfp4",
    summary="4-bit floats that share a power of two by 32, as gpt-oss has them; read as a source",
    reference="https://huggingface.co/docs/transformers/quantization/mxfp4",
    holds=(),
    engines=("reference", "transformers"),
    recognizes=partial(recognizes, "mxfp4"),
    open=_Reader,
    open_quantized=_Reader,
    kinds=(Kind("4", "E2M1, a source only"),),
    refusals=lambda _quantization: {"vllm": "it has not been tried with vLLM here"},
    since={"transformers": "5.23"},
)
