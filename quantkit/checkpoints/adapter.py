"""A LoRA adapter's folder as PEFT saves it: adapter_config.json and adapter_model.safetensors, read without PEFT.

What is read here says which tensors there are and what each is for; whose weights they change is not known here
(formats/_changed/adapted.py). Names of tensors: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quantkit.artifact import AdapterEntry
from quantkit.checkpoints.adapter_config import AGAIN, CONFIG, MERGE_FIRST, AdapterConfig
from quantkit.checkpoints.floats import FLOATS, STORED, count_unusable, to_float32
from quantkit.checkpoints.safetensors import TensorInfo, read_bytes, read_header
from quantkit.checkpoints.wrapped_names import PARALLEL, unwrapped
from quantkit.errors import SourceError
from quantkit.system.files import sha256_of
from quantkit.untrusted import inside, path_of, shown

WEIGHTS = "adapter_model.safetensors"
SLAB = 1 << 22  # bytes that are looked at together
PREFIX = "base_model.model."
NEW_ROWS = "new_embeddings.safetensors"  # of tokens that the base model lacks, as vLLM once read them
# What a tensor is of a layer's change, at the end of its name.
PARTS = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_B.bias": "bias",
    "lora_embedding_A": "table A",
    "lora_embedding_B": "table B",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
PART = re.compile(rf"(.+)\.({'|'.join(map(re.escape, PARTS))})")
OF_OTHERS = re.compile(r"\.(?:lora_|ia3_|hada_|lokr_|oft_|token_adapter\.|trainable_tokens)|\.default$")


@dataclass(frozen=True)
class LowRank:
    """What changes the weight of the layer `path`: B A times `scale`, with DoRA's `magnitude`; `bias` its bias.

    `a` (r, in) and `b` (out, r) of a linear layer; of a `table` of embeddings `a` (r, tokens) and `b` (width, r).
    """

    path: str
    table: bool
    a: TensorInfo
    b: TensorInfo
    scale: float
    magnitude: TensorInfo | None
    bias: TensorInfo | None


class Adapter:
    """The adapter in `folder`: `updates` by the layer's path, and tensors that are `replaced`, by name.

    Paths and names are those of transformers' model. `unwrapped`: whether wrapper prefixes were cut from its names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / NEW_ROWS).exists():
            raise SourceError(f"{folder} adds rows to the embedding ({NEW_ROWS}), which are not merged. {MERGE_FIRST}")
        self._config = AdapterConfig(folder)
        self.base = self._config.base
        self.replaced: dict[str, TensorInfo] = {}
        stored = _read_weights(folder)
        tensors = unwrapped(stored, (PARALLEL,))
        self.unwrapped = tensors.keys() != stored.keys()
        parts: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
        for name, info in tensors.items():
            self._sort(name, info, parts)
        if not parts and not self.replaced:
            raise SourceError(f"{folder / WEIGHTS} holds no tensors. {AGAIN}")
        targets = [path for path in parts if not (self._config.ties and self._repeats_table(path, parts))]
        if (wrong := self._config.untargeted(targets)) is not None:
            raise self._wrong(f"{wrong[0]}.lora_*", f"changes a layer that {wrong[1]} of {CONFIG} leaves out")
        scales = self._config.scales(list(parts))
        self.updates = {path: self._update(path, parts[path], *scales[path]) for path in parts}
        for name in tensors:
            path, inner, _ = name.removeprefix(PREFIX).rpartition(".base_layer.")
            if inner and path not in self.updates:
                raise self._wrong(name, "belongs to a layer that the adapter does not change")
        for name, info in tensors.items():
            self._refuse_non_finite(name, info)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @cached_property
    def entry(self) -> AdapterEntry:
        """What a manifest says of it."""
        kind = "DoRA" if self._config.dora else "rsLoRA" if self._config.rank_stabilized else "LoRA"
        hashes = {name: sha256_of(self.folder / name) for name in (CONFIG, WEIGHTS)}
        return AdapterEntry(name=self.name, kind=kind, hashes=hashes)

    def values(self, info: TensorInfo) -> NDArray[np.float32]:
        """One of its tensors in float32."""
        data = read_bytes(self.folder / info.file, info, 0, info.nbytes).view(STORED[info.dtype])
        return to_float32(data.reshape(info.shape), info.dtype)

    def equal(self, one: TensorInfo, other: TensorInfo, transposed: bool = False) -> bool:
        """Whether two of its tensors hold the same numbers; `transposed`: one of them the other way round."""
        if one.shape != (other.shape[::-1] if transposed else other.shape):
            return False
        a, b = self.values(one), self.values(other)
        return bool(np.array_equal(a, b.T if transposed else b))

    def _wrong(self, tensor: str, why: str, fix: str = AGAIN) -> SourceError:
        return SourceError(f"{self.folder / WEIGHTS}: the tensor {shown(tensor)} {why}. {fix}")

    def _lacks(self, tensor: str, why: str) -> SourceError:
        return SourceError(f"{self.folder / WEIGHTS} lacks the tensor {shown(tensor)}: {why}. {AGAIN}")

    def _sort(self, name: str, info: TensorInfo, parts: dict[str, dict[str, TensorInfo]]) -> None:
        if not name.startswith(PREFIX):
            raise self._wrong(name, f"is no part of a model: its name does not begin with {PREFIX}")
        if info.dtype not in FLOATS:
            raise self._wrong(name, f"is stored as {info.dtype}, not as floats")
        if not info.parameters:
            raise self._wrong(name, f"is empty: its shape is {info.shape}")
        own = name.removeprefix(PREFIX)
        if (part := PART.fullmatch(own)) is not None:
            parts[part[1]][PARTS[part[2]]] = info
        elif ".original_module." in own:  # what the base model had there, which peft takes no more
            return
        elif OF_OTHERS.search(own):
            raise self._wrong(name, "is of no kind that is merged", MERGE_FIRST)
        else:
            plain = own.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
            if plain in self.replaced and not self.equal(self.replaced[plain], info):
                raise self._wrong(name, f"has other values than {PREFIX}{plain}")
            self.replaced[plain] = info

    def _repeats_table(self, path: str, parts: Mapping[str, Mapping[str, TensorInfo]]) -> bool:
        """Whether a linear layer's matrices are those of an embedding, the other way round."""
        own = parts[path]
        return {"A", "B"} <= own.keys() and any(
            self.equal(own["A"], other["table B"], True) and self.equal(own["B"], other["table A"], True)
            for other in parts.values()
            if {"table A", "table B"} <= other.keys()
        )

    def _update(self, path: str, parts: dict[str, TensorInfo], rank: int, scale: float) -> LowRank:
        table = "table A" in parts or "table B" in parts
        if table and not parts.keys().isdisjoint(("A", "B", "bias")):
            raise self._wrong(f"{path}.lora_A", "is of a linear layer, and others are of an embedding")
        stem = f"{path}.lora_embedding_" if table else f"{path}.lora_"
        kinds = ("table A", "table B") if table else ("A", "B")
        for kind in kinds:
            if kind not in parts:
                raise self._lacks(f"{stem}{kind[-1]}", "A and B belong together")
        a, b = (parts[kind] for kind in kinds)
        for name, info, place in ((f"{stem}A", a, 0), (f"{stem}B", b, 1)):
            if len(info.shape) != 2:
                raise self._wrong(name, f"has the shape {info.shape} and is no matrix")
            if info.shape[place] != rank:
                raise self._wrong(name, f"has the shape {info.shape}, and {CONFIG} says rank {rank}")
        expected = {
            "magnitude": ("use_dora", self._config.dora),
            "bias": ("lora_bias", self._config.bias and not table),
        }
        for kind, (key, value) in expected.items():
            name, word = f"{path}.lora_{'magnitude_vector' if kind == 'magnitude' else 'B.bias'}", str(value).lower()
            if kind not in parts and value:
                raise self._lacks(name, f"{CONFIG} says {key} = {word}")
            if kind in parts and not value:
                raise self._wrong(name, f"is there, and {CONFIG} says {key} = {word}")
            if kind in parts and parts[kind].shape != (b.shape[0],):
                raise self._wrong(name, f"has the shape {parts[kind].shape}, not {(b.shape[0],)}")
        return LowRank(path, table, a, b, scale, parts.get("magnitude"), parts.get("bias"))

    def _refuse_non_finite(self, name: str, info: TensorInfo) -> None:
        for start in range(0, info.nbytes, SLAB):
            data = read_bytes(self.folder / info.file, info, start, min(SLAB, info.nbytes - start))
            if bad := count_unusable(data.view(STORED[info.dtype]), info.dtype):
                raise self._wrong(name, f"holds {bad} NaN or infinite values or such beyond 2^64")


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").exists()


def open_adapter(folder: str | Path) -> Adapter:
    """Open the adapter in `folder`; raises SourceError, and UnsupportedError for a kind that is not merged."""
    path = path_of(folder, SourceError)
    if not path.is_dir():
        raise SourceError(
            f"the adapter {path} is no folder. Give the folder that holds {CONFIG} and {WEIGHTS}; one of the hub is "
            "fetched with: hf download ORG/NAME --local-dir FOLDER"
        )
    return Adapter(path)


def _read_weights(folder: Path) -> dict[str, TensorInfo]:
    path = folder / WEIGHTS
    if path.is_symlink() and not inside(folder, path):
        raise SourceError(f"{path} is a link out of the adapter's folder. Put the file itself there.")
    if path.is_file():
        return read_header(path)
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise SourceError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when loaded. "
            f"Give an adapter with {WEIGHTS}."
        )
    raise SourceError(f"{folder} holds no {WEIGHTS}. Give the folder that peft's save_pretrained wrote.")
