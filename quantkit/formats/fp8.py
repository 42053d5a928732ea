"""FP8 checkpoints in DeepSeek's layout (transformers' `FineGrainedFP8Config`), as sources only.

A tensor NAME (N, K), or a stack of such matrices, is float8_e4m3fn with a NAME_scale_inv of shape [ceil(N/n),
ceil(K/k)] for `weight_block_size` (n, k), or one number per matrix if that is null (NAME_scale in AutoFP8's files).
value = code * scale. Scales are float32, bfloat16, float16, or powers of two (float8_e8m0fnu, or uint8 if `scale_fmt`
is ue8m0). Scales of activations and the KV cache are ignored; 4-bit experts are refused.
Values equal those of transformers (integrations/finegrained_fp8.py), which does not support partial edge blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.contracts.format import Format, Kind, Loading
from quantkit.errors import ArtifactError
from quantkit.formats._packed_layers import RowsReader
from quantkit.formats._quantization_config import quantization_of, recognizes
from quantkit.system.untrusted import shown

AGAIN = "Fetch the checkpoint again."
SCALES = ("_scale_inv", "_scale")  # suffixes of a tensor's name
LEFT_OUT = (".activation_scale", ".input_scale", ".k_scale", ".v_scale", ".kv_scale")
SCALE_TYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
CODES = "float8_e4m3fn"
VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()  # the value of each byte
MOST_SIDE = 1 << 24  # rows or columns of a block


class _Reader(RowsReader):
    def __init__(self, folder: Path, files: tuple[str, ...], _config: dict[str, Any]) -> None:
        super().__init__(folder, files)
        settings, where = quantization_of(folder), f"{folder / 'config.json'}: quantization_config"
        self._block = _block_size(settings, where)
        self._words = "null" if self._block is None else f"{self._block[0]} x {self._block[1]}"
        self.called = "fp8, " + ("one scale per tensor" if self._block is None else f"blocks of {self._words}")
        if settings.get("expert_dtype") not in (None, "fp8"):
            raise ArtifactError(f"{where}: expert_dtype is {shown(settings['expert_dtype'])}; only fp8 is supported")
        self._bytes_are_exponents = settings.get("scale_fmt") == "ue8m0"
        self.shapes = {name: self.stored.shape(name) for name in sorted(self.known) if self.stored.dtype(name) == CODES}
        self._scales = {name: self._scale_of(name) for name in self.shapes}
        scales = set(self._scales.values())
        self.scale_names = scales | {name for name in self.known if name.endswith(LEFT_OUT)}
        for name in sorted(self.known):
            dtype = self.stored.dtype(name)
            if name not in self.shapes and name not in scales and dtype.startswith("float8"):
                raise ArtifactError(f"{folder}: {name} is {dtype}, but codes must be {CODES}. {AGAIN}")
            if name.endswith(SCALES[0]) and name not in scales:
                raise ArtifactError(f"{folder} has {name} without its codes of {CODES}. {AGAIN}")

    def _scale_of(self, name: str) -> str:
        """Return the name of the tensor's scales, after checking dtypes and shapes."""
        scale = next((name + suffix for suffix in SCALES if name + suffix in self.known), None)
        if scale is None:
            raise ArtifactError(f"{self.folder} lacks the tensor {name}{SCALES[0]}, the scales of {name}. {AGAIN}")
        shape, found, dtype = self.shapes[name], self.stored.shape(scale), self.stored.dtype(scale)
        if len(shape) < 2 or 0 in shape:
            raise ArtifactError(f"{self.folder}: {name} has the shape {shape}, which is not a matrix of codes. {AGAIN}")
        if dtype not in SCALE_TYPES and not (dtype == "uint8" and self._bytes_are_exponents):
            raise ArtifactError(f"{self.folder}: the scales {scale} are {dtype}, not float32. {AGAIN}")
        grid = self._grid(shape)
        if found != grid and not (self._block is None and prod(found) == prod(grid) == 1):
            raise ArtifactError(
                f"{self.folder}: {scale} has the shape {found}; with weight_block_size {self._words} the codes {name} "
                f"of the shape {shape} have scales of the shape {grid}. {AGAIN}"
            )
        return scale

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of blocks in each dimension, including partial edge blocks."""
        rows, columns = (-(-side // block) for side, block in zip(shape[-2:], self._block or shape[-2:], strict=True))
        return (*shape[:-2], rows, columns)

    def dequantizer(self, name: str) -> Callable[[int, int], NDArray[np.float32]]:
        stored = self._scales[name]
        value = self.stored.read(stored)
        value = value.view(torch.float8_e8m0fnu) if value.dtype == torch.uint8 else value
        scales: NDArray[np.float32] = value.float().numpy()
        if not np.isfinite(scales).all():
            raise ArtifactError(f"{self.folder}: the scales {stored} of {name} are not finite. {AGAIN}")
        return partial(self._dequantized, name, scales.reshape(self._grid(self.shapes[name])))

    def _dequantized(self, name: str, scales: NDArray[np.float32], start: int, stop: int) -> NDArray[np.float32]:
        """Dequantize rows `start:stop` (of a stack: matrices); `scales` (..., n, k) are the scales of all blocks."""
        shape = self.shapes[name]
        values: NDArray[np.float32] = VALUES[self.stored.read_rows(name, start, stop)].reshape(-1, *shape[1:])
        rows, columns = self._block or shape[-2:]
        if len(shape) == 2:
            of_rows = scales[np.arange(start, stop) // rows]
        else:
            of_rows = np.repeat(scales[start:stop], rows, axis=-2)[..., : shape[-2], :]
        with np.errstate(over="ignore"):
            for block in range(of_rows.shape[-1]):
                values[..., block * columns : (block + 1) * columns] *= of_rows[..., block : block + 1]
        return values


def _block_size(settings: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    size = settings.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and 0 < n <= MOST_SIDE for n in size):
        raise ArtifactError(
            f"{where}: weight_block_size is {shown(size)}, not two numbers of rows and columns. {AGAIN}"
        )
    return size[0], size[1]


FORMAT = Format(
    name="fp8",
    summary="8-bit floats with a scale per block, as in DeepSeek's checkpoints; source only",
    reference="https://huggingface.co/docs/transformers/quantization/finegrained_fp8",
    holds=(),
    loading={"reference": Loading(), "transformers": Loading("5.23")},
    recognizes=partial(recognizes, "fp8"),
    open=_Reader,
    open_quantized=_Reader,
    kinds=(Kind("8", "E4M3, a source only"),),
    refusals=lambda _quantization: {"vllm": "it was not tested with vLLM"},
)
