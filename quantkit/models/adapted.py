"""A source with LoRA adapters, merged in float32 into each tensor when it is read.

Adapters are merged in order. The values are bit-identical to PEFT's `merge_and_unload` in float32, as products and sums
have the same order; PEFT itself is not needed.
LoRA: W + s B A, https://arxiv.org/abs/2106.09685, section 4.1. rsLoRA changes only s: https://arxiv.org/abs/2312.03732.
DoRA: m (W + s B A) / ||W + s B A||, with the norm of each output, https://arxiv.org/abs/2402.09353, equation 5.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quantkit.checkpoints.safetensors import TensorInfo
from quantkit.checkpoints.side_files import (
    TOKENIZER_FILES,
    VOCABULARIES,
    copy_files,
    find_side_files,
    matches,
    refuse_side_files,
)
from quantkit.errors import SourceError
from quantkit.models.adapter import WEIGHTS, Adapter, LowRank
from quantkit.models.config import load_tokenizer
from quantkit.models.skeleton import open_skeleton
from quantkit.models.source import OverriddenSource, Override, Source
from quantkit.system.files import temporary_folder
from quantkit.system.untrusted import shown


def merge_linear(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    magnitude: torch.Tensor | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    """Merge A (r, in), B (out, r) and DoRA's magnitude m (out), all float32, into W (out, in).

    A `transposed` W is (in, out), as embeddings (tokens, width) are.
    """
    delta = b @ a
    delta = (delta.T if transposed else delta) * scale
    if magnitude is None:
        return weight + delta
    norm = torch.linalg.norm(weight.T + delta.T if transposed else weight + delta, dim=1)
    factor = (magnitude / norm).view(-1, 1)
    return (factor.T if transposed else factor) * (weight + delta)


OTHER_BASE = "Give the base model that the adapter was made for."


class Change(NamedTuple):
    """An adapter's change to one tensor, in float32."""

    apply: Callable[[torch.Tensor], torch.Tensor]
    puts: bool = False  # the new values do not depend on the old ones
    copies: int = 3  # copies of the tensor in memory: old values, new values, and the update


class AdapterTargets:
    """The tensors of `base` that adapters change, and the changes; raises SourceError if a target does not exist.

    Adapters name transformers modules; a checkpoint may use other names, transposed layers, or one tensor for embedding
    and head. A tied head is untied if an adapter changes only one of the two.

    `tensors` and `config` describe the merged model; `changes` lists each tensor's changes. `copies` maps a tensor that
    `base` does not store, since it is tied, to the tensor that it is tied to.
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
        ends = list(filter(None, (self._model.get_input_embeddings(), self._model.get_output_embeddings())))
        self._ends = [paths[id(module)] for module in ends]  # embedding and head
        self.tied = len(ends) == 2 and ends[0].weight is ends[1].weight
        for adapter in adapters:
            self._take(adapter)
        self._set_vocabulary()

    def _take(self, adapter: Adapter) -> None:
        updates = {self._path(path): update for path, update in adapter.updates.items()}
        parts = ((name.rpartition("."), info) for name, info in adapter.replaced.items())
        replaced = {f"{self._path(path)}.{leaf}": info for (path, _, leaf), info in parts}
        for found, given in ((updates, adapter.updates), (replaced, adapter.replaced)):
            if len(found) < len(given):
                raise _wrong(adapter, min(given.keys() - found.keys()), "has two names there")
        if self.tied:
            self._untie(adapter, updates, replaced)
        for name, info in replaced.items():
            self._put(adapter, name, info)
        for path, update in updates.items():
            self._add(adapter, path, update)

    def _path(self, path: str) -> str:
        """Return the path in transformers' model of the adapter's module `path`; `path` itself if there is none."""
        path = path if self._base.text_prefixes is None else self._base.text_prefixes.alone(path)
        names = (path, self._prefix + path, path.removeprefix(self._prefix))
        return next((name for name in names if self._module(name) is not None), path)

    def _module(self, path: str) -> nn.Module | None:
        with suppress(AttributeError):
            module: nn.Module = self._model.get_submodule(path)
            return module
        return None

    def _stored(self, path: str, leaf: str) -> str | None:
        """Return the checkpoint's name of a module's tensor, or None."""
        plain, origins = f"{path}.{leaf}", self._skeleton.origins.items()
        for name in (plain, *(other for other, one in origins if one.name == plain and one.expert is None)):
            for stored in (name, name.removeprefix(self._prefix), self._prefix + name):
                if stored in self.tensors:
                    return stored
        return None

    def _place(self, adapter: Adapter, path: str, leaf: str) -> str:
        if (stored := self._stored(path, leaf)) is None:
            raise _wrong(adapter, f"{path}.{leaf}", f"does not fit: {self._base.model} has no such tensor")
        return stored

    def _untie(self, adapter: Adapter, updates: dict[str, LowRank], replaced: dict[str, TensorInfo]) -> None:
        """Untie the head, unless the adapter changes neither embedding nor head, or both equally.

        Equally: the low-rank matrices of one are the other's transposes.
        """
        embedding, head = self._ends
        first, last = updates.get(embedding), updates.get(head)
        one, other = replaced.get(f"{embedding}.weight"), replaced.get(f"{head}.weight")
        if not any((first, last, one, other)):
            return
        alike = bool(first) == bool(last) and bool(one) == bool(other)
        if alike and one and other:
            alike = adapter.equal(one, other)
        if alike and first and last:
            plain = first.magnitude is None and last.magnitude is None and first.scale == last.scale
            alike = plain and adapter.equal(first.a, last.b, True) and adapter.equal(first.b, last.a, True)
        if alike:
            updates.pop(head, None)
            replaced.pop(f"{head}.weight", None)
            return
        self.tied = False
        stored = self._place(adapter, embedding, "weight")
        if self._stored(head, "weight") is None:
            name = f"{head}.weight"
            self.copies[name] = stored
            self.tensors[name] = self.tensors[stored]
            self._change(name, self.tensors[stored].shape, *self.changes.get(stored, ()))
        self.config["tie_word_embeddings"] = False

    def _put(self, adapter: Adapter, name: str, info: TensorInfo) -> None:
        path, _, leaf = name.rpartition(".")
        stored = self._place(adapter, path, leaf)
        shape = self.tensors[stored].shape
        # A token table may have another number of rows, but both ends must have the same number.
        if info.shape != shape and not (path in self._ends and leaf == "weight" and info.shape[1:] == shape[1:]):
            raise _wrong(adapter, name, f"has the shape {info.shape}, but {shape} in {self._base.model}")
        self._change(stored, info.shape, Change(lambda _: _read(adapter, info), puts=True))

    def _add(self, adapter: Adapter, path: str, update: LowRank) -> None:
        module, stored = self._module(path), self._place(adapter, path, "weight")
        if module is not None and isinstance(module, nn.Embedding) != update.table:
            kind = "an embedding" if update.table else "a linear layer"
            raise _wrong(adapter, path, f"is changed like {kind}, but is not one in {self._base.model}")
        transposed = update.table or f"{path}.weight" in self._transposed
        shape, own = self.tensors[stored].shape, (update.b.shape[0], update.a.shape[1])
        own = own[::-1] if transposed else own
        if shape != own:
            raise _wrong(adapter, path, f"is changed as one of {own}, but it is {shape} in {self._base.model}")

        def merge(value: torch.Tensor) -> torch.Tensor:
            magnitude = None if update.magnitude is None else _read(adapter, update.magnitude)
            a, b = _read(adapter, update.a), _read(adapter, update.b)
            return merge_linear(value, a, b, update.scale, magnitude, transposed)

        self._change(stored, shape, Change(merge, copies=3 if update.magnitude is None else 4))
        if (added := update.bias) is not None:
            bias = self._place(adapter, path, "bias")
            if (shape := self.tensors[bias].shape) != added.shape:
                raise _wrong(adapter, f"{path}.bias", f"does not fit: it is {shape} in {self._base.model}")
            self._change(bias, shape, Change(lambda value: value + _read(adapter, added) * update.scale))

    def _change(self, name: str, shape: tuple[int, ...], *changes: Change) -> None:
        self.changes[name] += changes
        self.tensors[name] = replace(self.tensors[name], dtype="F32", shape=shape, start=0, nbytes=4 * prod(shape))

    def _set_vocabulary(self) -> None:
        """Update `vocab_size` if adapters changed it; raise SourceError if embedding and head have different sizes."""
        stored = {path: name for path in self._ends if (name := self._stored(path, "weight")) is not None}
        counts = {path: self.tensors[name].rows for path, name in stored.items()}
        if len(set(counts.values())) > 1:
            rows = ", ".join(f"{count} of {path}" for path, count in counts.items())
            raise SourceError(f"{self._base.model} has unequal numbers of tokens in embedding and head: {rows}")
        for name in stored.values():
            if name in self._base.tensors and self.tensors[name].rows != self._base.tensors[name].rows:
                self.config["vocab_size"] = self.tensors[name].rows


def _wrong(adapter: Adapter, name: str, why: str) -> SourceError:
    return SourceError(f"{adapter.folder / WEIGHTS}: {shown(name)} {why}. {OTHER_BASE}")


def _read(adapter: Adapter, info: TensorInfo) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(adapter.values(info)))


class AdaptedSource(OverriddenSource):
    """The source `base` with `adapters` merged; raises SourceError for an adapter tensor that does not fit."""

    def __init__(self, base: Source, adapters: Iterable[Adapter]) -> None:
        adapters = tuple(adapters)
        targets = AdapterTargets(base, adapters)
        self._changes, self._copies = targets.changes, targets.copies
        self._latest: tuple[str, NDArray[np.float32]] | None = None
        overrides = {}
        for name, changes in targets.changes.items():
            info, memory = targets.tensors[name], base.reading_bytes(self._copies.get(name, name))
            if changes:
                copies = max(change.copies for change in changes)
                memory = max(memory + 8 * info.parameters, 4 * copies * info.parameters)
            overrides[name] = Override(info, partial(self._rows, name), memory)
        config = {key: value for key, value in targets.config.items() if base.config.get(key) != value}
        super().__init__(base, overrides, config=config)
        self.adapters = adapters
        names = ", ".join(f"{adapter.name} ({adapter.kind})" for adapter in adapters)
        notes = [f"{names} merged in float32 into {len(overrides)} of {len(self.tensors)} tensors"]
        if "tie_word_embeddings" in config:
            notes.append("the head now has its own weights, since the adapter changes only embedding or head")
        if any(adapter.unwrapped for adapter in adapters):
            notes.append("a wrapper's prefix was removed from the names of an adapter's tensors")
        if (folder := self._tokenizer_folder) is not None:
            notes.append(f"the tokenizer is from the folder of the adapter {folder.resolve().name}")
        self.own_notes = tuple(notes)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """Return the hashes of the base model's files, and those of each adapter under ``adapter NUMBER: FILE``."""
        return self.base.hashes | {
            f"adapter {number}: {name}": digest
            for number, adapter in enumerate(self.adapters, 1)
            for name, digest in adapter.entry.hashes.items()
        }

    def _rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Return rows of a merged tensor; the whole tensor is cached until another one is read."""
        if self._latest is None or self._latest[0] != name:
            self._latest = None
            changes = self._changes[name]
            value = torch.empty(0)
            if not changes or not changes[0].puts:
                value = torch.from_numpy(np.array(self.base.floats(self._copies.get(name, name))))
            for change in changes:
                value = change.apply(value)
            self._latest = name, value.numpy()
        return self._latest[1][start:stop]

    def side_files(self) -> dict[str, Path]:
        """Return the base model's side files; tokenizer files come from the last adapter that has them."""
        files = self.base.side_files()
        if (folder := self._tokenizer_folder) is None:
            return files
        own = find_side_files(folder, TOKENIZER_FILES)
        return {name: path for name, path in files.items() if not matches(name, TOKENIZER_FILES)} | own

    @cached_property
    def _tokenizer_folder(self) -> Path | None:
        """Return the last adapter's folder with a tokenizer, if it differs from the base model's, else None."""
        for adapter in reversed(self.adapters):
            if find_side_files(adapter.folder, VOCABULARIES):
                refuse_side_files(adapter.folder)
                files, base = find_side_files(adapter.folder, TOKENIZER_FILES), self.base.side_files()
                same = (name in base and base[name].read_bytes() == path.read_bytes() for name, path in files.items())
                return None if all(same) else adapter.folder
        return None

    def copy_side_files(self, folder: Path) -> None:
        """Copy the side files to `folder`; the base model may generate its own."""
        self.base.copy_side_files(folder)
        if self._tokenizer_folder is not None:
            for path in find_side_files(folder, TOKENIZER_FILES).values():
                path.unlink()
            copy_files(self.side_files(), folder)

    def tokenizer(self) -> Any:
        return self.base.tokenizer() if self._tokenizer_folder is None else self._own_tokenizer

    @cached_property
    def _own_tokenizer(self) -> Any:
        # As for an artifact: transformers takes the tokenizer's class from config.json.
        with temporary_folder() as folder:
            (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
            self.copy_side_files(folder)
            return load_tokenizer(folder)
