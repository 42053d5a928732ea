"""Sources: read-only models, stored in any kind of files, whose tensors are read lazily.

An OverriddenSource wraps another source, with changed settings and with replaced, dropped or passed-through tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.rows import FLOATS, STORED, Rows, count_unusable, to_float32
from quantkit.checkpoints.safetensors import TensorInfo, to_torch
from quantkit.errors import SourceError, UnsupportedError
from quantkit.models.config import open_config
from quantkit.models.text_half import TextPrefixes, with_text
from quantkit.system.files import sha256_of
from quantkit.system.untrusted import shown

if TYPE_CHECKING:
    import torch

    from quantkit.models.adapter import Adapter

# Names of output heads and embeddings in transformers (`_tied_weights_keys`), embeddings by their modules' names.
HEADS = ("lm_head.weight", "embed_out.weight", "output_projection.weight", "head.weight")
EMBEDDINGS = (
    *("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tokens_embed.weight"),
    "embeddings.weight",
)


class Source(ABC):
    """A read-only model in files; each kind of files has a subclass."""

    folder: Path
    model: str  # the user's name for it
    revision: str | None = None
    config: dict[str, Any]  # config.json; for a multimodal checkpoint the text half's (text_half.py)
    whole_config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    text_prefixes: TextPrefixes | None = None
    passthrough: Mapping[str, str] = MappingProxyType({})  # tensors outside the model: published names to own names
    others: Mapping[str, TensorInfo] = MappingProxyType({})  # the same tensors by own name
    adapters: tuple[Adapter, ...] = ()  # merged into the values, in this order
    proven_finite = False  # every tensor was read and holds no NaN or infinity
    format = "float"

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the model's name without its folder."""

    @property
    @abstractmethod
    def weight_files(self) -> list[str]:
        """Return the names of the weight files."""

    @property
    @abstractmethod
    def hashed_files(self) -> list[str]:
        """Return the names of all files that affect the model's results."""

    @abstractmethod
    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the bytes of rows `start:stop` of a tensor, as stored; a scalar is one row."""

    @abstractmethod
    def copy_side_files(self, folder: Path) -> None:
        """Copy tokenizer, chat template, generation config and license files, if present."""

    @abstractmethod
    def tokenizer(self) -> Any:
        """Load the transformers tokenizer; raise SourceError."""

    def side_files(self) -> dict[str, Path]:
        """Return the files next to the weights (tokenizer and others), by name."""
        return {}

    @property
    def origin(self) -> Source:
        """Return the source whose files store these values."""
        return self

    @property
    def own_files(self) -> bool:
        """Return whether another program that opens the folder or file gets exactly this model."""
        return True

    @property
    def quantization(self) -> str | None:
        """Return a short description of the quantization, or None if the source is not quantized."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the user."""
        return ()

    def is_dequantized(self, _name: str) -> bool:
        """Return whether the tensor's values are computed from quantized codes."""
        return False

    def reading_bytes(self, _name: str) -> int:
        """Return the peak memory in bytes for reading a tensor, in addition to the returned rows."""
        return 0

    def published(self, name: str) -> str:
        """Return the published name of a tensor, or of one part of a quantized tensor."""
        return name if self.text_prefixes is None else self.text_prefixes.published(name)

    @property
    def architecture(self) -> str:
        """Return the configuration's `model_type`, such as ``llama``."""
        return str(self.config.get("model_type", ""))

    @property
    def parameters(self) -> int:
        """Return the number of stored weights, including passthrough tensors; tied tensors count once."""
        return sum(info.parameters for info in (*self.tensors.values(), *self.others.values()))

    @cached_property
    def settings(self) -> Any:
        """Return config.json as a transformers configuration with defaults; raise UnsupportedError."""
        return open_config(self.config)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """Return the sha256 of every file that affects the model's results, by file name."""
        return {name: sha256_of(self.folder / name) for name in self.hashed_files}

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's dtype, shape and location; raise SourceError for an unknown name."""
        info = self.tensors.get(name) or self.others.get(name)
        if info is None:
            raise SourceError(f"{self.model} has no tensor {name}; the checkpoint does not match its config.json")
        return info

    def stored(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return rows `start:stop` of a float tensor as stored (dtypes: checkpoints/rows.py)."""
        info = self.info(name)
        if info.dtype not in FLOATS:
            raise SourceError(f"{self.model}: the tensor {name} is stored as {info.dtype}, not as floats")
        stop = info.rows if stop is None else min(stop, info.rows)
        return self.read_rows(name, start, stop).view(STORED[info.dtype]).reshape(stop - start, *info.shape[1:])

    def floats(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Return rows `start:stop` of a float tensor as float32."""
        return to_float32(self.stored(name, start, stop), self.info(name).dtype)

    def in_rows(self, name: str) -> Rows:
        """Return a float tensor as lazily read Rows."""
        return Rows(self.info(name).shape, partial(self.floats, name))

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start:stop` of a tensor as a torch tensor in its stored dtype."""
        info = self.info(name)
        stop = min(stop, info.rows)
        return to_torch(self.read_rows(name, start, stop), info.dtype, (stop - start, *info.shape[1:]))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor in its stored dtype and shape."""
        info = self.info(name)
        return self.rows(name, 0, info.rows).reshape(info.shape)


def refuse_non_finite(source: Source, advance: Callable[[int], None] = lambda _values: None) -> None:
    """Read every float tensor once; raise SourceError at the first NaN, infinity, or magnitude above 2^64."""
    for name, info in (*source.tensors.items(), *source.others.items()) if not source.proven_finite else ():
        if info.dtype not in FLOATS:
            continue
        for start, stop in info.slabs():
            if bad := count_unusable(source.stored(name, start, stop), info.dtype):
                raise SourceError(
                    f"{source.model}: the tensor {name} in {info.file} has {bad} NaN or infinite values, or values "
                    "above 2^64. The checkpoint is damaged: fetch it again or use another revision."
                )
        advance(info.parameters)
    source.proven_finite = True


def refuse_another_head(source: Source) -> None:
    """Raise SourceError if config.json ties the output head but the checkpoint stores a different head.

    Weights are read only if a tied head is stored; transformers' default applies only if config.json has no setting.
    """
    head = next((name for name in HEADS if name in source.tensors), None)
    embedding = min((name for name in source.tensors if name.endswith(EMBEDDINGS)), key=len, default=None)
    if head is None or embedding is None or source.config.get("tie_word_embeddings") is False:
        return
    if source.settings.tie_word_embeddings:
        refuse_other_values(source, head, embedding)


def refuse_other_values(source: Source, copy: str, name: str) -> None:
    """Raise SourceError if `copy`, which config.json ties to `name`, has another dtype, shape or value."""
    one, other = source.tensors[copy], source.tensors[name]
    if (one.dtype, one.shape) != (other.dtype, other.shape) or not all(
        np.array_equal(source.read_rows(copy, *rows), source.read_rows(name, *rows)) for rows in one.slabs()
    ):
        raise SourceError(
            f"{source.model}: config.json ties {copy} to {name}, but the checkpoint has other values for it. Set "
            f"tie_word_embeddings to false in config.json if the model needs them; otherwise remove {copy}."
        )


Multipliers = NDArray[np.float32]  # one factor, or one per row


@dataclass(frozen=True)
class Override:
    """A tensor that replaces or extends those of the base source."""

    info: TensorInfo
    read: Callable[[int, int], NDArray[Any]]  # (start, stop) -> these rows, in the dtype of `info`
    memory: int = 0  # most bytes for this besides the returned rows


class OverriddenSource(Source):
    """The source `base` with changed tensors (`overrides`, `dropped`) and changed settings (`config`).

    `passthrough` replaces the base's mapping; `notes` are added. With overridden tensors, no file stores the values,
    and the `format` is "float".
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
    """Return an Override that extends a tensor to `count` rows with copies of its first row."""
    info = base.info(name)

    def read(start: int, stop: int) -> NDArray[np.uint8]:
        own = base.read_rows(name, start, min(stop, info.rows)) if start < info.rows else np.empty(0, np.uint8)
        return np.concatenate([own, np.tile(base.read_rows(name, 0, 1), max(0, stop - max(start, info.rows)))])

    longer = replace(info, shape=(count, *info.shape[1:]), nbytes=info.nbytes // info.rows * count)
    return Override(longer, read, base.reading_bytes(name))


def multiplied(
    base: Source, factors: Mapping[str, Multipliers], config: Mapping[str, Any], copies: Mapping[str, str]
) -> OverriddenSource:
    """Multiply tensors of `base` by `factors` in float32 and update `config`, for engines without multipliers.

    `copies` maps new tensors to base tensors: a head tied to an embedding that has another factor.
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
    notes = [f"factors of config.json are folded into the weights of {len(factors)} tensors, since the format has none"]
    if copies:
        notes.append("the head now has its own weights, since its factor differs from the embedding's")
    return OverriddenSource(base, overrides, config=config, notes=tuple(notes))


def _multiplied_rows(base: Source, name: str, factors: Multipliers, start: int, stop: int) -> NDArray[np.float32]:
    values = base.floats(name, start, stop)
    of_rows = factors if factors.size == 1 else factors[start:stop]
    product: NDArray[np.float32] = values * of_rows.reshape(-1, *[1] * (values.ndim - 1))
    return product


def rows_times(source: Source, name: str, given: Any) -> Multipliers:
    """Parse a tensor's factors, a number or (rows, number) pairs; raise UnsupportedError if they do not fit."""
    pairs = given if isinstance(given, list) else [(1, given)]
    for _, number in pairs:
        if not isinstance(number, int | float) or not math.isfinite(number) or not number:
            raise UnsupportedError(f"{source.model}: config.json multiplies {name} by {shown(number)}, not a factor")
    factors = np.concatenate([np.full(count, number, np.float32) for count, number in pairs])
    if len(factors) not in (1, source.info(name).rows):
        rows = source.info(name).rows
        raise UnsupportedError(f"{source.model}: {name} has {rows} rows, but config.json {len(factors)} factors")
    return factors
