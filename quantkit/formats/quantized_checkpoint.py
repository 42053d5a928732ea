"""A checkpoint folder whose layers are quantized, as a source: one layer at a time is dequantized as it is read.

Its values come as float32, whoever wrote it; what is not quantized comes as it is stored. config.json's
`quantization_config` names the format.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.rows import Rows, rows_of_array
from quantkit.checkpoints.safetensors import TensorInfo
from quantkit.contracts.format import Layout, QuantizedReader
from quantkit.contracts.registry import find_format, formats
from quantkit.contracts.stored import NamedReader
from quantkit.errors import ArtifactError, RecipeError, SourceError
from quantkit.formats.float.checkpoint import Checkpoint, read_folder
from quantkit.models.text_half import config_of, places_of
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.numerics.scaled.weight import ScaledWeight
from quantkit.untrusted import shown

KEY = "quantization_config"
FETCH = "Fetch the checkpoint again."
OpenQuantized = Callable[[Path, tuple[str, ...], dict[str, Any]], QuantizedReader]


class QuantizedCheckpoint(Checkpoint):
    """Such a folder. `reader` has the codes of the weights that are `quantized`, `format` is the format's name."""

    _codes_aside: frozenset[str] = frozenset()  # of the tensors beside the text half, those that are quantized

    def __init__(
        self, kind: str, read: OpenQuantized, folder: Path, model: str, revision: str | None, config: dict[str, Any],
        stored: dict[str, TensorInfo],
    ) -> None:  # fmt: skip
        self._latest: tuple[str, Rows] | None = None
        plain = {key: value for key, value in config.items() if key != KEY}
        places, files = places_of(plain, stored), sorted({info.file for info in stored.values()})
        alone = plain if places is None else config_of(plain, places, stored)
        try:
            self.reader = read(folder, tuple(files), alone)
            shapes = {name: self.reader.quantized_shape(name) for name in self.reader.names()}
        except ArtifactError as error:
            raise _of_source(error) from None
        self.quantized = frozenset(name for name, shape in shapes.items() if shape is not None)
        if not self.quantized:
            raise SourceError(
                f"{model}: config.json says that layers are quantized ({self.reader.quantization()}), and no tensor "
                f"is. Take {KEY} out if all are floats. {FETCH}"
            )
        # Experts that lie in one tensor are stored as transformers has them.
        matrices = {name for name, shape in shapes.items() if shape is not None and len(shape) == 2}
        self._transposed = _transposed(alone) & matrices
        tensors = {
            name: stored[name] if shape is None else self._info(name, shape, files[0]) for name, shape in shapes.items()
        }
        super().__init__(folder, model, revision, plain, tensors)
        self.format, self._files = kind, files
        if self.places is not None:
            self.reader = NamedReader(self.reader, self.places, self.kept)
            self._codes_aside = self.quantized & self._aside.keys()
            self.quantized = frozenset(text for name in self.quantized if (text := self.places.text(name)) is not None)

    def reads_as_stored(self, name: str) -> bool:
        """Not where it is quantized."""
        return name not in self.quantized and name not in self._codes_aside

    def reading_bytes(self, name: str) -> int:
        """Of a quantized layer: its codes as words of 64 bits, then as bytes, and its values."""
        return 0 if self.reads_as_stored(name) else 17 * self.info(name).parameters

    def _info(self, name: str, shape: tuple[int, ...], file: str) -> TensorInfo:
        shape = shape[::-1] if name in self._transposed else shape
        return TensorInfo(file, "F32", shape, 0, 4 * prod(shape))

    @property
    def quantization(self) -> str | None:
        """How the layers are quantized."""
        return self.reader.quantization()

    def layout(self) -> Layout:
        """What would hold the codes; raises SourceError for damaged ones, UnsupportedError where none are grouped."""
        try:
            return self.reader.layout()
        except ArtifactError as error:
            raise _of_source(error) from None

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows of a tensor.

        Of a quantized layer that its reader does not give in rows all values are in memory until another is read.
        """
        if name not in self.quantized:
            return super().read_rows(name, start, stop)
        try:
            if self._latest is None or self._latest[0] != name:
                self._latest = None
                self._latest = name, self._rows(name)
            values = self._latest[1].read(start, stop)
        except ArtifactError as error:
            raise _of_source(error) from None
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def _rows(self, name: str) -> Rows:
        stored = self.reader.read(name)
        if isinstance(stored, Rows):
            return rows_of_array(stored.whole().T) if name in self._transposed else stored
        if not isinstance(stored, GroupedWeight | ScaledWeight):
            return rows_of_array(stored.float().numpy())
        values: NDArray[np.float32] = stored.dense().numpy()
        return rows_of_array(values.T if name in self._transposed else values)


def open_folder(folder: Path, model: str, revision: str | None = None, only: str | None = None) -> Checkpoint:
    """Open the checkpoint in `folder`, quantized or not, which the user calls `model`; raises SourceError.

    `only` is the name of the one weight file that is the model, where a user gave it.
    """
    config, tensors = read_folder(folder, model, only)
    quantization = config.get(KEY)
    if quantization is None:
        return Checkpoint(folder, model, revision, config, tensors)
    name = quantization.get("quant_method") if isinstance(quantization, dict) else None
    try:
        kind = find_format(str(name))
    except RecipeError:
        kind = None
    if kind is None or kind.open_quantized is None:
        known = ", ".join(name for name, kind in formats().items() if kind.open_quantized is not None)
        what = shown(quantization if name is None else name)
        raise SourceError(
            f"{model} is already quantized ({what}), in none of the formats that are read here: {known}. "
            "Give the unquantized model it was made from."
        )
    return QuantizedCheckpoint(kind.name, kind.open_quantized, folder, model, revision, config, tensors)


def _of_source(error: ArtifactError) -> SourceError:
    text = str(error).replace("Convert again with --force.", FETCH).replace("Convert again.", FETCH)
    return SourceError(text)


def _transposed(config: dict[str, Any]) -> frozenset[str]:
    """Names of the tensors that transformers keeps the other way round (GPT-2's), where codes are (out, in)."""
    from quantkit.models.skeleton import open_skeleton

    origins = open_skeleton(config).origins.values()
    return frozenset(origin.name for origin in origins if origin.transposed)
