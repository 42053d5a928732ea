"""Open a quantized checkpoint as a source: layers are dequantized to float32 one at a time, when read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.rows import Rows, rows_of_array
from quantkit.checkpoints.safetensors import TensorInfo
from quantkit.contracts.format import Format, Layout
from quantkit.contracts.registry import find_format, formats
from quantkit.contracts.stored import NamedReader
from quantkit.errors import ArtifactError, RecipeError, SourceError
from quantkit.formats._quantization_config import FILES, GPTQ_FILE, KEYS, source_quantization
from quantkit.formats.float import Checkpoint, read_folder
from quantkit.models.text_half import config_of, prefixes_of
from quantkit.numerics.quantized_weight import GroupedWeight, ScaledWeight
from quantkit.system.untrusted import shown

AGAIN = re.compile(r"(Convert again( with --force)?|Fetch the checkpoint again)\.")
FETCH = "Fetch the files again if they are damaged. If not, quantkit does not support them; give the unquantized model."


class QuantizedCheckpoint(Checkpoint):
    """A quantized checkpoint as a source; `reader` gives access to the codes of the weights named in `quantized`."""

    _other_codes: frozenset[str] = frozenset()  # quantized tensors outside the text half

    def __init__(
        self, kind: Format, folder: Path, model: str, revision: str | None, config: dict[str, Any],
        stored: dict[str, TensorInfo], said_in: str,
    ) -> None:  # fmt: skip
        self._latest: tuple[str, Rows] | None = None
        assert kind.open_quantized is not None  # `open_folder` has refused the others
        self.format, self._said_in = kind.name, said_in.partition(":")[0]
        plain = {key: value for key, value in config.items() if key not in KEYS}
        prefixes, files = prefixes_of(plain, stored), sorted({info.file for info in stored.values()})
        alone = plain if prefixes is None else config_of(plain, prefixes, stored)
        with _errors_of_source():
            self.reader = kind.open_quantized(folder, tuple(files), alone)
            shapes = {name: self.reader.quantized_shape(name) for name in self.reader.names()}
        self.quantized = frozenset(name for name, shape in shapes.items() if shape is not None)
        if not self.quantized:
            raise SourceError(
                f"{model}: {said_in} says that layers are quantized ({self.reader.quantization()}), but no tensor is. "
                f"Remove {said_in.rpartition(' ')[2]} if all are floats."
            )
        # Experts in one tensor are stored in transformers' layout.
        matrices = {name for name, shape in shapes.items() if shape is not None and len(shape) == 2}
        self._transposed = _transposed(alone) & matrices
        tensors = {
            name: stored[name] if shape is None else self._info(name, shape, files[0]) for name, shape in shapes.items()
        }
        super().__init__(folder, model, revision, plain, tensors)
        self._files = files
        if prefixes is not None:
            self.reader = NamedReader(self.reader, prefixes, self.passthrough)
            self._other_codes = self.quantized & self.others.keys()
            self.quantized = frozenset(text for name in self.quantized if (text := prefixes.text(name)) is not None)

    @property
    def hashed_files(self) -> list[str]:
        said_in = [self._said_in, *([GPTQ_FILE] if (self.folder / GPTQ_FILE).is_file() else [])]
        return list(dict.fromkeys((*super().hashed_files, *said_in)))

    def is_dequantized(self, name: str) -> bool:
        return name in self.quantized or name in self._other_codes

    def reading_bytes(self, name: str) -> int:
        """Return 17 bytes per weight for codes as int64, codes as uint8, and float values; 0 for dense tensors."""
        return 17 * self.info(name).parameters if self.is_dequantized(name) else 0

    def _info(self, name: str, shape: tuple[int, ...], file: str) -> TensorInfo:
        shape = shape[::-1] if name in self._transposed else shape
        return TensorInfo(file, "F32", shape, 0, 4 * prod(shape))

    @property
    def quantization(self) -> str | None:
        return self.reader.quantization()

    def layout(self) -> Layout:
        with _errors_of_source():
            return self.reader.layout()

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the bytes of rows; a layer that must be dequantized as a whole is cached until another one is read."""
        if name not in self.quantized:
            return super().read_rows(name, start, stop)
        with _errors_of_source():
            if self._latest is None or self._latest[0] != name:
                self._latest = None
                self._latest = name, self._rows(name)
            values = self._latest[1].read(start, stop)
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
    """Open a checkpoint folder, quantized or not; `only` names a single weight file to use."""
    config, tensors = read_folder(folder, model, only)
    with _errors_of_source():
        said_in, quantization = source_quantization(folder)
    codes = next((name for name in tensors if name.endswith(".qweight")), None)
    if codes is None and (quantization is None or said_in in FILES):
        return Checkpoint(folder, model, revision, config, tensors)
    if quantization is None:
        raise SourceError(
            f"{model} has quantized layers ({codes}), but neither config.json nor {' nor '.join(FILES)} has their "
            f"settings. Add {KEYS[0]} to config.json."
        )
    name = quantization.get("quant_method")
    try:
        kind = find_format(str(name))
    except RecipeError:
        kind = None
    if kind is None or kind.open_quantized is None:
        known = ", ".join(name for name, kind in formats().items() if kind.open_quantized is not None)
        what = shown(quantization if name is None else name)
        raise SourceError(
            f"{model} is already quantized ({what}), in a format that quantkit cannot read. It reads: {known}. "
            "Give the unquantized model it was made from."
        )
    return QuantizedCheckpoint(kind, folder, model, revision, config, tensors, said_in)


@contextmanager
def _errors_of_source() -> Iterator[None]:
    try:
        yield
    except ArtifactError as error:
        raise SourceError(AGAIN.sub(FETCH, str(error))) from None


def _transposed(config: dict[str, Any]) -> frozenset[str]:
    """Return the tensors that transformers stores as (in, out), as in GPT-2; quantized layouts store (out, in)."""
    from quantkit.models.skeleton import open_skeleton

    origins = open_skeleton(config).origins.values()
    return frozenset(origin.name for origin in origins if origin.transposed)
