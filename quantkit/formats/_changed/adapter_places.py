"""Which tensors of a base model an adapter changes, and how: all that it has finds its place, or is refused.

An adapter names modules of transformers' model; a checkpoint may have other names, transposed layers, or one tensor
for embedding and head. A head that is tied gets weights of its own where an adapter changes only one of the two: so
the model computes what it did with the adapter beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from quantkit.checkpoints.adapter import WEIGHTS, Adapter, LowRank
from quantkit.checkpoints.safetensors import TensorInfo
from quantkit.errors import SourceError
from quantkit.models.skeleton import open_skeleton
from quantkit.models.source import Source
from quantkit.numerics.low_rank import merge_linear
from quantkit.untrusted import shown

OTHER_BASE = "Give the base model that the adapter was made for."


@dataclass(frozen=True)
class Change:
    """What an adapter does to one tensor: `put` one of its own there, or `add` an update; to the bias where `bias`."""

    adapter: Adapter
    put: TensorInfo | None = None
    add: LowRank | None = None
    bias: bool = False
    transposed: bool = False

    def apply(self, value: torch.Tensor | None) -> torch.Tensor:
        """The tensor afterwards, in float32; `value` is not looked at where another takes its place."""
        if self.put is not None:
            return self._read(self.put)
        assert value is not None
        assert self.add is not None
        update = self.add
        if self.bias:
            assert update.bias is not None
            return value + self._read(update.bias) * update.scale
        a, b = self._read(update.a), self._read(update.b)
        magnitude = None if update.magnitude is None else self._read(update.magnitude)
        return merge_linear(value, a, b, update.scale, magnitude, bool(update.table) or self.transposed)

    def _read(self, info: TensorInfo) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.adapter.values(info)))


class Places:
    """Where the tensors of `adapters`, taken in their order, go in the model `base`; raises SourceError.

    `tensors` and `config` are the base model's as they are afterwards, `changes` what is done to each tensor.
    `copies`: tensors that the base model does not have, since it ties them to another, and that other's name.
    """

    def __init__(self, base: Source, adapters: Iterable[Adapter]) -> None:
        self._base = base
        self.config: dict[str, Any] = dict(base.config)
        self.tensors = dict(base.tensors)
        self.changes: dict[str, list[Change]] = defaultdict(list)
        self.copies: dict[str, str] = {}
        self._skeleton = open_skeleton(base.config, settings=base.settings)
        self._model = self._skeleton.model
        self._prefix = f"{self._model.base_model_prefix}."
        self._transposed = {origin.name for origin in self._skeleton.origins.values() if origin.transposed}
        paths = {id(module): path for path, module in self._model.named_modules()}
        ends = [
            module for module in (self._model.get_input_embeddings(), self._model.get_output_embeddings()) if module
        ]
        self._ends = [paths[id(module)] for module in ends]  # embedding and head
        self.tied = len(ends) == 2 and ends[0].weight is ends[1].weight
        for adapter in adapters:
            self._take(adapter)
        self._settle_rows()

    def _take(self, adapter: Adapter) -> None:
        updates: dict[str, LowRank] = {}
        replaced: dict[str, TensorInfo] = {}
        for path, update in adapter.updates.items():
            if updates.setdefault(self._path(path), update) is not update:
                raise self._wrong(adapter, path, "has two names there")
        for name, info in adapter.replaced.items():
            path, _, leaf = name.rpartition(".")
            if replaced.setdefault(f"{self._path(path)}.{leaf}", info) is not info:
                raise self._wrong(adapter, name, "has two names there")
        if self.tied:
            self._part_ends(adapter, updates, replaced)
        for name, info in replaced.items():
            self._put(adapter, name, info)
        for path, update in updates.items():
            self._add(adapter, path, update)

    def _wrong(self, adapter: Adapter, name: str, why: str) -> SourceError:
        return SourceError(f"{adapter.folder / WEIGHTS}: {shown(name)} {why}. {OTHER_BASE}")

    def _module(self, path: str) -> nn.Module | None:
        try:
            module: nn.Module = self._model.get_submodule(path)
        except AttributeError:
            return None
        return module

    def _path(self, path: str) -> str:
        """How the base model's class calls the module that an adapter calls `path`, if it has it."""
        path = path if self._base.places is None else self._base.places.alone(path)
        names = (path, self._prefix + path, path.removeprefix(self._prefix))
        return next((name for name in names if self._module(name) is not None), path)

    def _stored(self, path: str, leaf: str) -> str | None:
        """The name of a module's tensor in the checkpoint, if it has it."""
        plain, origins = f"{path}.{leaf}", self._skeleton.origins.items()
        for name in (plain, *(other for other, one in origins if one.name == plain and one.expert is None)):
            for stored in (name, name.removeprefix(self._prefix), self._prefix + name):
                if stored in self.tensors:
                    return stored
        return None

    def _place(self, adapter: Adapter, path: str, leaf: str) -> str:
        stored = self._stored(path, leaf)
        if stored is None:
            raise self._wrong(adapter, f"{path}.{leaf}", f"has no place: {self._base.model} has no such tensor")
        return stored

    def _part_ends(self, adapter: Adapter, updates: dict[str, LowRank], replaced: dict[str, TensorInfo]) -> None:
        """Untie the head, unless the adapter leaves both ends alone or does the same to both."""
        first, last = self._ends
        one, other = f"{first}.weight", f"{last}.weight"
        if not {first, last} & updates.keys() and not {one, other} & replaced.keys():
            return
        if _do_the_same(adapter, updates.get(first), updates.get(last), replaced.get(one), replaced.get(other)):
            updates.pop(last, None)
            replaced.pop(other, None)
            return
        self.tied = False
        stored = self._place(adapter, first, "weight")
        if self._stored(last, "weight") is None:
            self.copies[other] = stored
            self.tensors[other] = self.tensors[stored]
            self._change(other, self.tensors[stored].shape, *self.changes.get(stored, ()))
        self._set("tie_word_embeddings", False)

    def _set(self, key: str, value: object) -> None:
        """Change a setting of config.json, also where the text model has settings of its own."""
        inner = self.config.get("text_config")
        if isinstance(inner, dict):
            self.config["text_config"] = inner | {key: value}
        if not isinstance(inner, dict) or key in self.config or key.startswith("tie"):
            self.config[key] = value

    def _put(self, adapter: Adapter, name: str, info: TensorInfo) -> None:
        path, _, leaf = name.rpartition(".")
        stored = self._place(adapter, path, leaf)
        shape = self.tensors[stored].shape
        # A table of tokens may have other rows; at the end both ends must have as many.
        if info.shape != shape and not (path in self._ends and leaf == "weight" and info.shape[1:] == shape[1:]):
            raise self._wrong(adapter, name, f"has the shape {info.shape}, and {shape} in {self._base.model}")
        self._change(stored, info.shape, Change(adapter, put=info))

    def _add(self, adapter: Adapter, path: str, update: LowRank) -> None:
        module, stored = self._module(path), self._place(adapter, path, "weight")
        if module is not None and isinstance(module, nn.Embedding) != update.table:
            kind = "an embedding" if update.table else "a linear layer"
            raise self._wrong(adapter, path, f"is changed like {kind}, and is none in {self._base.model}")
        transposed = f"{path}.weight" in self._transposed
        shape, own = self.tensors[stored].shape, (update.b.shape[0], update.a.shape[1])
        own = own[::-1] if update.table or transposed else own
        if shape != own:
            raise self._wrong(adapter, path, f"is changed as one of {own}, and it is {shape} in {self._base.model}")
        self._change(stored, shape, Change(adapter, add=update, transposed=transposed))
        if update.bias is not None:
            bias = self._place(adapter, path, "bias")
            if (shape := self.tensors[bias].shape) != update.bias.shape:
                raise self._wrong(adapter, f"{path}.bias", f"does not fit: it is {shape} in {self._base.model}")
            self._change(bias, shape, Change(adapter, add=update, bias=True))

    def _change(self, name: str, shape: tuple[int, ...], *changes: Change) -> None:
        self.changes[name] += changes
        self.tensors[name] = replace(self.tensors[name], dtype="F32", shape=shape, start=0, nbytes=4 * prod(shape))

    def _settle_rows(self) -> None:
        """Refuse ends with other numbers of tokens, and tell config.json their number where it has changed."""
        stored = {path: name for path in self._ends if (name := self._stored(path, "weight")) is not None}
        counts = {path: self.tensors[name].shape[0] for path, name in stored.items()}
        if len(set(counts.values())) > 1:
            rows = ", ".join(f"{count} of {path}" for path, count in counts.items())
            raise SourceError(f"{self._base.model} has other numbers of tokens at its ends with its adapters: {rows}")
        before = {self._base.tensors[name].shape[0] for name in stored.values() if name in self._base.tensors}
        for count in set(counts.values()) - before:
            self._set("vocab_size", count)


def _do_the_same(
    adapter: Adapter,
    first: LowRank | None,
    last: LowRank | None,
    one: TensorInfo | None,
    other: TensorInfo | None,
) -> bool:
    """Whether an adapter changes embedding (`first`, or `one` in its place) and head alike; their matrices are
    each other's transposes."""
    if (first is None) != (last is None) or (one is None) != (other is None):
        return False
    if one is not None and other is not None and not adapter.equal(one, other):
        return False
    if first is None or last is None:
        return True
    plain = first.magnitude is None and last.magnitude is None and first.scale == last.scale
    return plain and adapter.equal(first.a, last.b, True) and adapter.equal(first.b, last.a, True)
