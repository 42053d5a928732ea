"""Read a LoRA adapter as PEFT saves it (adapter_config.json, adapter_model.safetensors), without PEFT.

Fields: https://huggingface.co/docs/peft/package_reference/lora; tensor names:
https://huggingface.co/docs/peft/developer_guides/checkpoint. Unknown fields with a value are refused, since they may
change the result. Not supported: kinds other than LoRA, rsLoRA and DoRA, and initializations that change the base
model's weights (pissa, olora, corda, loftq, lora_ga).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantkit.checkpoints.rows import FLOATS, STORED, count_unusable, to_float32
from quantkit.checkpoints.safetensors import PARALLEL, TensorInfo, read_header, read_rows, unwrapped
from quantkit.errors import SourceError, UnsupportedError
from quantkit.records.artifact import AdapterEntry
from quantkit.system.files import sha256_of
from quantkit.system.untrusted import full_matches, inside, path_of, read_object, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_CONFIG = 1 << 22  # bytes; a file with a rank for each of 10,000 layers has a tenth of it
MERGE_FIRST = "Merge it with peft (merge_and_unload) and give the merged folder as MODEL."
AGAIN = "Save the adapter again with peft's save_pretrained."
PREFIX = "base_model.model."
NEW_ROWS = "new_embeddings.safetensors"  # rows for tokens that the base model lacks, which old vLLM versions read
# Ignored fields: the tensors decide which layers have updates.
IDLE = (
    *("peft_type", "base_model_name_or_path", "task_type", "revision", "inference_mode", "lora_dropout", "bias"),
    *("auto_mapping", "peft_version", "megatron_core", "runtime_config", "loftq_config", "eva_config", "corda_config"),
    *("lora_ga_config", "qalora_group_size", "modules_to_save", "fan_in_fan_out"),
)
KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal")  # values of init_lora_weights
# Parts of a layer's update, by the endings of their names.
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

Rank = Annotated[int, Field(ge=1, le=1 << 16)]
Alpha = Annotated[float, Field(gt=-1e9, lt=1e9)]
Number = Annotated[int, Field(ge=0, le=1 << 16)]
Value = TypeVar("Value")


class AdapterConfig(BaseModel):
    """The content of adapter_config.json, with PEFT's defaults."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    base_model_name_or_path: str | None = None
    r: Rank = 8
    lora_alpha: Alpha = 8
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Alpha] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    lora_bias: bool | None = None
    init_lora_weights: bool | str | None = None
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: Number | list[Number] | None = None
    layers_pattern: str | list[str] | None = None
    ensure_weight_tying: bool | None = None


@dataclass(frozen=True)
class LowRank:
    """A low-rank weight update: B A times `scale`."""

    table: bool  # whether it is an embedding
    a: TensorInfo  # (r, in); for an embedding (r, tokens)
    b: TensorInfo  # (out, r); for an embedding (width, r)
    scale: float
    magnitude: TensorInfo | None  # DoRA's
    bias: TensorInfo | None  # added to the layer's bias


class Adapter:
    """A LoRA adapter: `updates` by layer and `replaced` tensors by name, with transformers' names.

    `unwrapped`: names had wrapper prefixes, now removed. Raises SourceError for damaged files, UnsupportedError for
    a kind of adapter that quantkit cannot merge.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.resolve().name
        if (folder / NEW_ROWS).exists():
            raise SourceError(f"{folder} adds rows to the embedding ({NEW_ROWS}): not supported. {MERGE_FIRST}")
        self._config = config = read_config(folder)
        self.kind = "DoRA" if config.use_dora else "rsLoRA" if config.use_rslora else "LoRA"
        stored = read_header(_weights(folder))
        tensors = unwrapped(stored, (PARALLEL,))
        self.unwrapped = tensors.keys() != stored.keys()
        self.replaced: dict[str, TensorInfo] = {}
        parts: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
        for name, info in tensors.items():
            self._sort(name, info, parts)
        if not parts and not self.replaced:
            raise SourceError(f"{folder / WEIGHTS} has no tensors. {AGAIN}")
        self._refuse_left_out(parts)
        ranks = self._by_pattern("rank_pattern", config.rank_pattern, list(parts), config.r)
        alphas = self._by_pattern("alpha_pattern", config.alpha_pattern, list(parts), config.lora_alpha)
        self.updates = {path: self._update(path, parts[path], ranks[path], alphas[path]) for path in parts}
        for name, info in tensors.items():
            path, inner, _ = name.removeprefix(PREFIX).rpartition(".base_layer.")
            if inner and path not in self.updates:
                raise self._wrong(name, "belongs to a layer that the adapter does not change")
            for start, stop in info.slabs():
                data = read_rows(folder, info, start, stop).view(STORED[info.dtype])
                if bad := count_unusable(data, info.dtype):
                    raise self._wrong(name, f"has {bad} NaN or infinite values, or values above 2^64")

    @cached_property
    def entry(self) -> AdapterEntry:
        hashes = {name: sha256_of(self.folder / name) for name in (CONFIG, WEIGHTS)}
        return AdapterEntry(name=self.name, kind=self.kind, hashes=hashes)

    def values(self, info: TensorInfo) -> NDArray[np.float32]:
        """Read one of the adapter's tensors as float32."""
        data = read_rows(self.folder, info, 0, info.rows).view(STORED[info.dtype])
        return to_float32(data.reshape(info.shape), info.dtype)

    def equal(self, one: TensorInfo, other: TensorInfo, transposed: bool = False) -> bool:
        """Return whether two of the adapter's tensors are equal, or transposes of each other if `transposed`."""
        if one.shape != (other.shape[::-1] if transposed else other.shape):
            return False
        a, b = self.values(one), self.values(other)
        return bool(np.array_equal(a, b.T if transposed else b))

    def _wrong(self, tensor: str, why: str, fix: str = AGAIN) -> SourceError:
        return SourceError(f"{self.folder / WEIGHTS}: the tensor {shown(tensor)} {why}. {fix}")

    def _lacks(self, tensor: str, why: str) -> SourceError:
        return SourceError(f"{self.folder / WEIGHTS} lacks the tensor {shown(tensor)}: {why}. {AGAIN}")

    def _sort(self, name: str, info: TensorInfo, parts: dict[str, dict[str, TensorInfo]]) -> None:
        """Add a tensor to a layer's update in `parts`, or to the replaced tensors."""
        if not name.startswith(PREFIX):
            raise self._wrong(name, f"is not a part of a model: its name does not begin with {PREFIX}")
        if info.dtype not in FLOATS:
            raise self._wrong(name, f"is stored as {info.dtype}, not as floats")
        if not info.parameters:
            raise self._wrong(name, f"is empty: its shape is {info.shape}")
        own = name.removeprefix(PREFIX)
        if (part := PART.fullmatch(own)) is not None:
            parts[part[1]][PARTS[part[2]]] = info
        elif ".original_module." in own:  # the base model's tensor, which peft no longer uses
            return
        elif OF_OTHERS.search(own):
            raise self._wrong(name, "is of a kind that quantkit cannot merge", MERGE_FIRST)
        else:
            plain = own.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
            other = self.replaced.setdefault(plain, info)
            if other is not info and not self.equal(other, info):
                raise self._wrong(name, f"differs from {PREFIX}{plain}")

    def _by_pattern(
        self, field: str, patterns: Mapping[str, Value] | None, paths: list[str], default: Value
    ) -> dict[str, Value]:
        """Return a value for each path: that of the first pattern that matches the path or its end, else `default`."""
        expressions = [rf"(.*\.)?({pattern})" for pattern in patterns or ()]
        found = full_matches(expressions, paths, f"{self.folder / CONFIG}: {field}", SourceError)
        pairs = list(zip((patterns or {}).values(), found, strict=True))
        return {path: next((value for value, matched in pairs if path in matched), default) for path in paths}

    def _refuse_left_out(self, parts: Mapping[str, Mapping[str, TensorInfo]]) -> None:
        """Raise SourceError for tensors of a layer that adapter_config.json excludes, since PEFT would ignore them."""
        config = self._config
        # A head that is tied to the embedding repeats the embedding's update and is not named.
        paths = [path for path in parts if not (config.ensure_weight_tying and self._repeats_table(path, parts))]
        left_out: dict[str, str] = {}  # path -> the field that excludes it
        for field, named in (("target_modules", config.target_modules), ("exclude_modules", config.exclude_modules)):
            if named and named != "all-linear":
                matched = self._named(field, named, paths)
                left_out |= {path: field for path in paths if (path in matched) == (field == "exclude_modules")}
        layers, lists = config.layers_to_transform, config.layers_pattern or []
        if layers not in (None, []):
            numbers = layers if isinstance(layers, list) else [layers]
            names = [lists] if isinstance(lists, str) else lists
            left_out |= {path: "layers_to_transform" for path in paths if _layer_of(path, names) not in numbers}
        for path, field in left_out.items():
            raise self._wrong(f"{path}.lora_*", f"changes a layer that {field} of {CONFIG} excludes")

    def _named(self, field: str, named: str | list[str], paths: list[str]) -> frozenset[str]:
        """Return the paths that match the expression `named`, or that end with one of the names in the list."""
        if isinstance(named, str):
            return full_matches([named], paths, f"{self.folder / CONFIG}: {field}", SourceError)[0]
        return frozenset(path for path in paths if f".{path}".endswith(tuple(f".{name}" for name in named)))

    def _repeats_table(self, path: str, parts: Mapping[str, Mapping[str, TensorInfo]]) -> bool:
        """Return whether a linear layer's low-rank matrices are the transposes of an embedding's."""
        own = parts[path]
        return {"A", "B"} <= own.keys() and any(
            self.equal(own["A"], other["table B"], True) and self.equal(own["B"], other["table A"], True)
            for other in parts.values()
            if {"table A", "table B"} <= other.keys()
        )

    def _update(self, path: str, parts: dict[str, TensorInfo], rank: int, alpha: float) -> LowRank:
        table = "table A" in parts or "table B" in parts
        if table and not parts.keys().isdisjoint(("A", "B", "bias")):
            raise self._wrong(f"{path}.lora_A", "is of a linear layer, but others are of an embedding")
        config, stem = self._config, f"{path}.lora_{'embedding_' if table else ''}"
        if table:
            parts = {kind.removeprefix("table "): info for kind, info in parts.items()}
        for kind in "AB":
            if kind not in parts:
                raise self._lacks(f"{stem}{kind}", "both A and B are needed")
        a, b = parts["A"], parts["B"]
        for name, info, place in ((f"{stem}A", a, 0), (f"{stem}B", b, 1)):
            if len(info.shape) != 2 or info.shape[place] != rank:
                raise self._wrong(name, f"has the shape {info.shape}, but {CONFIG} has the rank {rank}")
        for kind, part, key, wanted in (
            ("magnitude", "magnitude_vector", "use_dora", bool(config.use_dora)),
            ("bias", "B.bias", "lora_bias", bool(config.lora_bias) and not table),
        ):
            name = f"{path}.lora_{part}"
            if wanted and kind not in parts:
                raise self._lacks(name, f"{CONFIG} says {key} = true")
            if kind in parts and not wanted:
                raise self._wrong(name, f"is there, but {CONFIG} does not set {key} = true")
            if kind in parts and parts[kind].shape != (b.shape[0],):
                raise self._wrong(name, f"has the shape {parts[kind].shape}, not {(b.shape[0],)}")
        scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        return LowRank(table, a, b, scale, parts.get("magnitude"), parts.get("bias"))


def _layer_of(path: str, lists: list[str]) -> int | None:
    """Return the first layer index in a module path, after one of the names `lists` (or any name, if empty)."""
    parts = path.split(".")
    for place in range(1, len(parts) - 1):
        if parts[place].isdecimal() and (not lists or parts[place - 1] in lists):
            return int(parts[place])
    return None


def is_adapter(folder: Path) -> bool:
    """Return whether the folder holds an adapter and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").exists()


def base_of(folder: Path) -> str | None:
    """Return the base model's name in adapter_config.json, or None; raise SourceError for a damaged file."""
    name = read_object(folder / CONFIG, SourceError, AGAIN, MOST_CONFIG).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def open_adapter(folder: str | Path) -> Adapter:
    """Open the adapter in `folder`; raise SourceError, or UnsupportedError for a kind that cannot be merged."""
    path = path_of(folder, SourceError)
    if not path.is_dir():
        raise SourceError(
            f"the adapter {path} is not a folder. Give the folder with {CONFIG} and {WEIGHTS}; fetch one of the hub "
            "with: hf download ORG/NAME --local-dir FOLDER"
        )
    return Adapter(path)


def read_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json; raise SourceError for a damaged file, UnsupportedError for unmergeable settings."""
    path = folder / CONFIG
    if not path.is_file():
        raise SourceError(f"{folder} has no {CONFIG}, so it is not an adapter. Give the folder that has it.")
    if not inside(folder, path):
        raise SourceError(f"{path} is a link out of the adapter's folder. Put the file itself there.")
    values = read_object(path, SourceError, AGAIN, MOST_CONFIG)
    if (kind := values.get("peft_type")) != "LORA":
        raise UnsupportedError(
            f"{folder} is an adapter of the kind {shown(kind)}. quantkit merges only LoRA. For others: {MERGE_FIRST}"
        )
    try:
        config = AdapterConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = shown(".".join(map(str, first["loc"])))[1:-1]
        raise SourceError(f"{path}: {key} is {shown(first['input'])}: {first['msg']}. {AGAIN}") from None
    for key, value in (config.model_extra or {}).items():
        if key not in IDLE and value not in (None, False, "", [], {}):
            raise UnsupportedError(f"{path} sets {shown(key)} ({shown(value)}), which is unsupported. {MERGE_FIRST}")
    if config.init_lora_weights not in KEEPS_BASE:
        raise UnsupportedError(
            f"{path}: init_lora_weights is {shown(config.init_lora_weights)}, which also changes the base model's "
            "weights. Save the adapter with peft's path_initial_model_for_weight_conversion, or merge it."
        )
    if config.use_dora and config.lora_bias:
        raise UnsupportedError(f"{path}: use_dora with lora_bias is not merged, as peft's own merge is not exact")
    return config


def _weights(folder: Path) -> Path:
    path = folder / WEIGHTS
    if path.is_symlink() and not inside(folder, path):
        raise SourceError(f"{path} is a link out of the adapter's folder. Put the file itself there.")
    if path.is_file():
        return path
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise SourceError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when loaded. "
            f"Give an adapter with {WEIGHTS}."
        )
    raise SourceError(f"{folder} has no {WEIGHTS}. Give the folder that peft's save_pretrained wrote.")
