"""A source over another: other settings, computed tensors, names left out or passed through."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.safetensors import TensorInfo
from quantkit.errors import UnsupportedError
from quantkit.models.config import open_config
from quantkit.models.source import Source
from quantkit.models.text_half import with_text
from quantkit.system.untrusted import shown

Multipliers = NDArray[np.float32]  # one, or one for each row


@dataclass(frozen=True)
class Override:
    """A replaced or further tensor."""

    info: TensorInfo
    read: Callable[[int, int], NDArray[Any]]  # (start, stop) -> these rows, in the dtype of `info`
    memory: int = 0  # most bytes that this takes besides the returned rows


class OverriddenSource(Source):
    """`base` with the tensors `overrides` and the settings `config` in place of its own, without those `dropped`.

    `passthrough` replaces the base's, `notes` are added. If tensors are overridden, no file holds the values: the
    `format` is "float".
    """

    def __init__(
        self,
        base: Source,
        overrides: Mapping[str, Override] | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        dropped: Collection[str] = (),
        passthrough: Mapping[str, str] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.base, self._overrides, self.own_notes = base, dict(overrides or {}), notes
        self.folder, self.model, self.revision, self.adapters = base.folder, base.model, base.revision, base.adapters
        self.config, self.whole_config, self.text_prefixes = base.config, base.whole_config, base.text_prefixes
        if config:
            self.config = {**base.config, **config}
            self.whole_config = self.config if base.text_prefixes is None else with_text(base.whole_config, config)
        infos = {name: override.info for name, override in self._overrides.items()}
        self.tensors = {name: info for name, info in (base.tensors | infos).items() if name not in dropped}
        self.passthrough = base.passthrough if passthrough is None else passthrough
        self.others = {name: base.info(name) for name in self.passthrough.values()}
        if not infos:
            self.format, self.proven_finite = base.format, base.proven_finite

    @property
    def origin(self) -> Source:
        return self if self._overrides else self.base.origin

    @property
    def own_files(self) -> bool:
        return not self._overrides and self.base.own_files

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def weight_files(self) -> list[str]:
        return self.base.weight_files

    @property
    def hashed_files(self) -> list[str]:
        return self.base.hashed_files

    @cached_property
    def hashes(self) -> dict[str, str]:
        return self.base.hashes

    @cached_property
    def settings(self) -> Any:
        return self.base.settings if self.config is self.base.config else open_config(self.config)

    @property
    def quantization(self) -> str | None:
        return self.base.quantization

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.base.notes, *self.own_notes)

    def is_dequantized(self, name: str) -> bool:
        return self.base.is_dequantized(name)

    def reading_bytes(self, name: str) -> int:
        override = self._overrides.get(name)
        return self.base.reading_bytes(name) if override is None else override.memory

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        if (override := self._overrides.get(name)) is None:
            return self.base.read_rows(name, start, stop)
        return np.ascontiguousarray(override.read(start, stop)).reshape(-1).view(np.uint8)

    def side_files(self) -> dict[str, Path]:
        return self.base.side_files()

    def copy_side_files(self, folder: Path) -> None:
        self.base.copy_side_files(folder)

    def tokenizer(self) -> Any:
        return self.base.tokenizer()


def padded(base: Source, name: str, count: int) -> Override:
    """Lengthen a tensor to `count` rows with copies of its first row."""
    info = base.info(name)

    def read(start: int, stop: int) -> NDArray[np.uint8]:
        own = base.read_rows(name, start, min(stop, info.rows)) if start < info.rows else np.empty(0, np.uint8)
        return np.concatenate([own, np.tile(base.read_rows(name, 0, 1), max(0, stop - max(start, info.rows)))])

    longer = replace(info, shape=(count, *info.shape[1:]), nbytes=info.nbytes // info.rows * count)
    return Override(longer, read, base.reading_bytes(name))


def multiplied(
    base: Source, factors: Mapping[str, Multipliers], config: Mapping[str, Any], copies: Mapping[str, str]
) -> OverriddenSource:
    """Multiply the tensors of `base` by `factors` in float32, and set `config`, for engines without such factors.

    `copies` are tensors that the base has under another name: a head tied to an embedding that has another factor.
    """
    overrides = {}
    for name in dict.fromkeys((*factors, *copies)):
        own = copies.get(name, name)
        info, memory = base.info(own), base.reading_bytes(own)
        if name in factors:
            read = partial(_multiplied_rows, base, own, factors[name])
            float32 = replace(info, dtype="F32", nbytes=4 * info.parameters)
            overrides[name] = Override(float32, read, memory + info.nbytes)
        else:
            overrides[name] = Override(info, partial(base.read_rows, own), memory)
    notes = [f"factors of config.json put into the weights of {len(factors)} tensors, since the format has none"]
    if copies:
        notes.append("the head has weights of its own now: its factor is not the embedding's")
    return OverriddenSource(base, overrides, config=config, notes=tuple(notes))


def _multiplied_rows(base: Source, name: str, factors: Multipliers, start: int, stop: int) -> NDArray[np.float32]:
    values = base.floats(name, start, stop)
    of_rows = factors if factors.size == 1 else factors[start:stop]
    product: NDArray[np.float32] = values * of_rows.reshape(-1, *[1] * (values.ndim - 1))
    return product


def rows_times(source: Source, name: str, given: Any) -> Multipliers:
    """Return a tensor's factors, `given` as a number or as (rows, number) pairs; raises UnsupportedError."""
    pairs = given if isinstance(given, list) else [(1, given)]
    for _, number in pairs:
        if not isinstance(number, int | float) or not math.isfinite(number) or not number:
            raise UnsupportedError(f"{source.model}: config.json multiplies {name} by {shown(number)}, no factor")
    factors = np.concatenate([np.full(count, number, np.float32) for count, number in pairs])
    if len(factors) not in (1, source.info(name).rows):
        rows = source.info(name).rows
        raise UnsupportedError(f"{source.model}: {name} has {rows} rows, and config.json factors for {len(factors)}")
    return factors
