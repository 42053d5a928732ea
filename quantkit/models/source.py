"""A source: a read-only model whose tensors are read when they are asked for, whatever files they lie in."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from quantkit.artifact import AdapterEntry
from quantkit.checkpoints.floats import FLOATS, STORED, count_unusable, to_float32
from quantkit.checkpoints.rows import Rows
from quantkit.checkpoints.safetensors import DTYPES, TensorInfo
from quantkit.errors import SourceError
from quantkit.models.config import open_config
from quantkit.models.text_half import Places, roots
from quantkit.system.files import sha256_of

if TYPE_CHECKING:
    import torch

SLAB_BYTES = 4 << 20  # of a tensor that is read whole, in slabs
# Of the output head and the embedding in transformers (`_tied_weights_keys`), the embedding after its module's name.
HEADS = ("lm_head.weight", "embed_out.weight", "output_projection.weight", "head.weight")
EMBEDDINGS = (
    *("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tokens_embed.weight"),
    "embeddings.weight",
)


class Source(ABC):
    """What is the same for every kind of files.

    `config` is config.json as a dict, `tensors` what is known of each tensor without reading it, `model` what the user
    calls it, `folder` where its files lie, `format` the name of their format. Of a multimodal checkpoint `config` and
    `tensors` are those of its text half alone, which lies at `places` (text_half.py). `kept` are tensors beside the
    model by their published names, each with the name that it is read by.
    """

    folder: Path
    model: str
    revision: str | None = None
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    format = "float"
    places: Places | None = None
    kept: Mapping[str, str] = MappingProxyType({})
    _aside: Mapping[str, TensorInfo] = MappingProxyType({})  # those tensors, by the names that they are read by
    _whole: dict[str, Any] | None = None
    _notes: tuple[str, ...] = ()
    proven_finite = False  # whether every tensor was read and holds no NaN or infinity

    @property
    @abstractmethod
    def name(self) -> str:
        """What the model is called, without a place."""

    @property
    @abstractmethod
    def weight_files(self) -> list[str]:
        """Names of the files that hold weights."""

    @property
    @abstractmethod
    def hashed_files(self) -> list[str]:
        """Names of all files that decide what the model computes."""

    @abstractmethod
    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows `start:stop` of a tensor in its dtype; a scalar is one row."""

    @abstractmethod
    def copy_side_files(self, folder: Path) -> None:
        """Copy tokenizer, chat template, generation config and licence where the source has them."""

    @abstractmethod
    def tokenizer(self) -> Any:
        """The tokenizer of transformers; raises SourceError."""

    @property
    def quantization(self) -> str | None:
        """How the values were quantized before, in a few words; None where they were not."""
        return None

    @property
    def adapters(self) -> tuple[AdapterEntry, ...]:
        """The adapters that are merged into its values, in their order."""
        return ()

    @property
    def adapter_folders(self) -> tuple[str, ...]:
        """Where those lie."""
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of it."""
        return self._notes

    @property
    def own_files(self) -> bool:
        """Whether a program that opens its folder, or its one file, finds this very model there."""
        return True

    def side_files(self) -> dict[str, Path]:
        """The tokenizer's and other files that belong to it, by name, where they lie beside the weights."""
        return {}

    @property
    def architecture(self) -> str:
        """The `model_type` of the configuration, such as ``llama``."""
        return str(self.config.get("model_type", ""))

    @property
    def parameters(self) -> int:
        """Number of stored weights (tied tensors are stored once), those that are kept among them."""
        return sum(info.parameters for info in (*self.tensors.values(), *self._aside.values()))

    @property
    def whole_config(self) -> dict[str, Any]:
        """The checkpoint's config.json, that of a multimodal model as a whole."""
        return self.config if self._whole is None else self._whole

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum((self.folder / name).stat().st_size for name in self.weight_files)

    @cached_property
    def settings(self) -> Any:
        """config.json as the configuration of transformers, with its defaults; raises UnsupportedError."""
        return open_config(self.config)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """sha256 of every file that decides what the model computes, by file name."""
        return {name: sha256_of(self.folder / name) for name in self.hashed_files}

    def without(self, names: Collection[str], *notes: str) -> Self:
        """This source, but for some of its tensors; `notes` tell a user of it."""
        other = copy.copy(self)
        other._notes = (*self._notes, *notes)
        other.tensors = {name: info for name, info in self.tensors.items() if name not in names}
        return other

    def shortened(self, blocks: int) -> Self:
        """This source as a model of its first decoder blocks alone; the tensors of the others stay, unused."""
        known = getattr(self.settings, "attribute_map", {})
        names = {"num_hidden_layers", "n_layer", known.get("num_hidden_layers", "num_hidden_layers")}
        other = copy.copy(self)
        other.config = {key: blocks if key in names else value for key, value in self.config.items()}
        if isinstance(kinds := self.config.get("layer_types"), list):
            other.config["layer_types"] = kinds[:blocks]
        other.__dict__.pop("settings", None)
        return other

    def keeping(self, names: Collection[str]) -> Self:
        """This source, with some of its tensors beside the model, to be kept as they are."""
        other = self.without(names)
        other.kept = {**self.kept, **{self.published(name): name for name in names}}
        other._aside = {**self._aside, **{name: self.tensors[name] for name in names}}
        return other

    def keeping_only(self, names: Collection[str]) -> Self:
        """This source without tensors beside the model but those of these published names."""
        other = copy.copy(self)
        other.kept = {name: own for name, own in self.kept.items() if name in names}
        other._aside = {own: self._aside[own] for own in other.kept.values()}
        return other

    def reads_as_stored(self, _name: str) -> bool:
        """Whether a tensor is given as its files have it, by the name that it is read by."""
        return True

    def reading_bytes(self, _name: str) -> int:
        """Most bytes of memory that reading a tensor takes beside the rows that are given."""
        return 0

    def published(self, name: str) -> str:
        """What a checkpoint of this model calls a tensor, or a part of a quantized one."""
        return name if self.places is None else self.places.published(name)

    def kept_info(self, name: str) -> TensorInfo:
        """What is known of a kept tensor, by its published name."""
        return self._aside[self.kept[name]]

    def read_kept(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows `start:stop` of a kept tensor, by its published name; a scalar is one row."""
        return self.read_rows(self.kept[name], start, stop)

    @property
    def kept_modules(self) -> tuple[str, ...]:
        """The outermost modules that hold nothing but kept tensors, by their published names."""
        return roots(self.kept, map(self.published, self.tensors))

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor; raises SourceError for an unknown name."""
        info = self.tensors.get(name) or self._aside.get(name)
        if info is None:
            raise SourceError(f"{self.model} has no tensor {name}; the checkpoint does not match its config.json")
        return info

    def stored(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Rows `start:stop` of a tensor of floats, all of a scalar, as numpy has them (checkpoints/floats.py)."""
        info = self.info(name)
        if info.dtype not in FLOATS:
            raise SourceError(f"{self.model}: the tensor {name} is stored as {info.dtype}, not as floats")
        count = info.shape[0] if info.shape else 1
        stop = count if stop is None else min(stop, count)
        return self.read_rows(name, start, stop).view(STORED[info.dtype]).reshape(stop - start, *info.shape[1:])

    def floats(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """What `stored` returns, in float32."""
        return to_float32(self.stored(name, start, stop), self.info(name).dtype)

    def in_rows(self, name: str) -> Rows:
        """A tensor of floats, each of its rows read when it is asked for."""
        return Rows(self.info(name).shape, partial(self.floats, name))

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype and shape."""
        shape = self.info(name).shape
        return self.rows(name, 0, shape[0] if shape else 1).reshape(shape)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start:stop` of one tensor."""
        import torch

        info = self.info(name)
        stop = min(stop, info.shape[0] if info.shape else 1)
        values = torch.from_numpy(self.read_rows(name, start, stop)).view(getattr(torch, DTYPES[info.dtype]))
        return values.reshape(stop - start, *info.shape[1:])

    def select_rows(self, name: str, rows: list[int]) -> torch.Tensor:
        """The given rows of one tensor, (len(rows), ...), without reading the others."""
        import torch

        return torch.cat([self.rows(name, row, row + 1) for row in rows])

    def refuse_non_finite(self, tell: Callable[[str, int], None] = lambda _name, _bytes: None) -> None:
        """Read every float tensor, in slabs of rows; raise SourceError at the first value that no weight has.

        That is NaN, infinity, or one beyond 2^64. A source that has passed is not read again.
        """
        for name, info in (*self.tensors.items(), *self._aside.items()) if not self.proven_finite else ():
            if info.dtype not in FLOATS:
                continue
            rows = info.shape[0] if info.shape else 1
            step = max(1, rows * SLAB_BYTES // max(info.nbytes, 1))
            for start in range(0, rows, step):
                if bad := count_unusable(self.stored(name, start, start + step), info.dtype):
                    raise SourceError(
                        f"{self.model}: the tensor {name} in {info.file} holds {bad} NaN or infinite values or such "
                        "beyond 2^64. The checkpoint is damaged: fetch it again or use another revision."
                    )
            tell(name, info.nbytes)
        self.proven_finite = True


def refuse_another_head(source: Source) -> None:
    """Raise SourceError if config.json ties the output head to the embedding and the checkpoint stores another head.

    Weights are read only where a tied head is stored, and transformers is asked only where config.json says nothing.
    """
    head = next((name for name in HEADS if name in source.tensors), None)
    embedding = min((name for name in source.tensors if name.endswith(EMBEDDINGS)), key=len, default=None)
    if head is None or embedding is None or source.config.get("tie_word_embeddings") is False:
        return
    if source.settings.tie_word_embeddings:
        refuse_other_values(source, head, embedding)


def refuse_other_values(source: Source, copy: str, name: str) -> None:
    """Raise SourceError if the tensor `copy`, which config.json ties to `name`, has another dtype, shape or value."""
    one, other = source.tensors[copy], source.tensors[name]
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    rows = one.shape[0] if one.shape else 1
    step = max(1, rows * SLAB_BYTES // max(one.nbytes, 1))
    for start in range(0, rows if same else 0, step):
        stop = min(start + step, rows)
        same = same and bool((source.read_rows(copy, start, stop) == source.read_rows(name, start, stop)).all())
    if not same:
        raise SourceError(
            f"{source.model}: config.json ties {copy} to {name}, and the checkpoint holds other values for it. Set "
            f"tie_word_embeddings to false in config.json if the model needs them; otherwise remove {copy}."
        )
