"""Unquantized checkpoints as published on Hugging Face: safetensors files and a config.json.

Opening reads only headers. Tensors are read one at a time, or as a slab of rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.rows import Rows, rows_in_memory
from quantkit.checkpoints.safetensors import DTYPES, TensorInfo, read_header, read_rows, unwrapped
from quantkit.checkpoints.side_files import (
    GENERATION,
    copy_side_files,
    find_side_files,
    note_not_copied,
    refuse_side_files,
)
from quantkit.contracts.format import Content, Format, Kind, Layout, Loading, TensorWriter, Written
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError, QuantkitError, SourceError, UnsupportedError
from quantkit.formats._quantization_config import refuse_other_dtypes
from quantkit.models.config import load_tokenizer, refuse_config, refuse_token_ids
from quantkit.models.source import Source
from quantkit.models.text_half import config_of, prefixes_of
from quantkit.system.untrusted import read_object, shown

if TYPE_CHECKING:
    from quantkit.models.skeleton import Skeleton
    from quantkit.records.artifact import Artifact

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
PIECE = 1 << 20  # values in memory at a time
LONGEST_NAME = 255  # bytes of a file name
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MOST_SHARDS = 10_000
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


class Checkpoint(Source):
    """A checkpoint folder as a source. Raises SourceError, or UnsupportedError for an unknown multimodal layout."""

    def __init__(
        self, folder: Path, model: str, revision: str | None, config: dict[str, Any], tensors: dict[str, TensorInfo]
    ) -> None:
        self.folder, self.model, self.revision = folder, model, revision
        stored = tensors
        if self.format == "float":
            tensors = _with_embedding(config, unwrapped(tensors))
        self._renamed = next((pair for pair in zip(stored, tensors, strict=True) if pair[0] != pair[1]), None)
        self.config, self.whole_config, self.tensors = config, config, tensors
        self._files = sorted({info.file for info in tensors.values()})
        if (prefixes := prefixes_of(config, tensors)) is None:
            return
        self.text_prefixes, self.config = prefixes, config_of(config, prefixes, tensors)
        own = {name: text for name in tensors if (text := prefixes.text(name)) is not None}
        self.tensors = {text: tensors[name] for name, text in own.items()}
        self.others = {name: info for name, info in tensors.items() if name not in own}
        self.passthrough = {name: name for name in self.others}
        if twice := self.others.keys() & self.tensors.keys():
            raise SourceError(f"{model} has the tensor {min(twice)} twice, with and without a prefix")

    @property
    def name(self) -> str:
        if self.revision is not None or self.model == "demo" or not Path(self.model).expanduser().exists():
            return self.model
        return self.folder.resolve().name

    @property
    def weight_files(self) -> list[str]:
        return self._files

    @property
    def notes(self) -> tuple[str, ...]:
        notes = list(_notes_of_index(self.folder))
        if self._renamed is not None:
            stored, name = self._renamed
            notes.append(f"tensors have other names than in transformers' model: {stored} is read as {name}")
        return (*notes, *note_not_copied(self.folder))

    @property
    def own_files(self) -> bool:
        if self._renamed is not None:
            return False
        if (self.folder / INDEX).is_file():
            return set(_read_index(self.folder / INDEX)) == set(self.weight_files)
        return self.weight_files == [SINGLE]

    @property
    def hashed_files(self) -> list[str]:
        return ["config.json", *self.weight_files]

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        return read_rows(self.folder, self.info(name), start, stop)

    def side_files(self) -> dict[str, Path]:
        return find_side_files(self.folder)

    def copy_side_files(self, folder: Path) -> None:
        copy_side_files(self.folder, folder)

    def tokenizer(self) -> Any:
        return load_tokenizer(self.folder)


def _with_embedding(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """If a tied matrix is stored only as the output head, use it as the embedding, as transformers does."""
    if config.get("tie_word_embeddings") is not True or HEAD not in tensors or EMBEDDING in tensors:
        return tensors
    if not any(name.startswith("model.layers.") for name in tensors):
        return tensors
    return {EMBEDDING if name == HEAD else name: info for name, info in tensors.items()}


def _shards(folder: Path, only: str | None) -> dict[str, set[str]]:
    """Return the weight files, with the tensors that an index assigns to each; `only` restricts to one file."""
    index, single = folder / INDEX, folder / SINGLE
    if (folder / "adapter_config.json").exists():
        raise SourceError(
            f"{folder} has an adapter (adapter_config.json), which transformers would add to the weights. "
            "Move the adapter's files to another folder and give that with --adapter."
        )
    if only is not None:
        part = SHARD.fullmatch(only)
        if (part is not None and int(part[3]) > 1) or (
            index.is_file() and only in (names := _read_index(index)) and len(names) > 1
        ):
            raise SourceError(f"{folder / only} is one of several files of a model. Give their folder: {folder}")
        return {only: set()}
    if index.is_file():
        shards = _read_index(index)
        if single.is_file() and set(shards) != {single.name}:
            raise SourceError(
                f"{folder} has {single.name} and an index of other files ({', '.join(sorted(shards)[:2])}, ...): "
                "programs differ in which they read. Remove the files that are not the model."
            )
        return shards
    if single.is_file():
        return {single.name: set()}
    if others := sorted(path.name for path in folder.glob("*.safetensors") if path.is_file()):
        return {name: set() for name in _of_one_model(folder, others)}
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise SourceError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when loaded. "
            "Use a revision with safetensors, or convert the file to safetensors in a sandbox."
        )
    raise SourceError(f"{folder} has no {SINGLE}. Give a Hugging Face checkpoint folder with safetensors.")


def _of_one_model(folder: Path, names: list[str]) -> list[str]:
    """Return a folder's weight files if it has no index: one file or a complete numbered set; raise SourceError."""
    parts = [part for name in names if (part := SHARD.fullmatch(name)) is not None]
    if len(names) == 1 and not parts:
        return names
    if len(parts) < len(names) or len({(part[1], part[3]) for part in parts}) > 1:
        raise SourceError(
            f"{folder} has several weight files and no {INDEX}: {', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}. Give the file that is the model, or the index."
        )
    stem, count = parts[0][1], int(parts[0][3])
    there = {int(part[2]) for part in parts}
    if missing := sorted(set(range(1, min(count, MOST_SHARDS) + 1)) - there):
        raise SourceError(
            f"{folder} lacks the shard {stem}-{missing[0]:05}-of-{count:05}.safetensors. Fetch the checkpoint again."
        )
    if count != len(parts):
        raise SourceError(f"{folder} has {len(parts)} shards whose names say {count}. Fetch it again.")
    return names


def _notes_of_index(folder: Path) -> Iterator[str]:
    """Yield notes on stored tensors that the index omits or assigns to another file."""
    shards = _read_index(folder / INDEX) if (folder / INDEX).is_file() else {}
    named = {name for names in shards.values() for name in names}
    others = [(name, file) for file, names in shards.items() for name in read_header(folder / file).keys() - names]
    if older := sorted(pair for pair in others if pair[0] in named):
        what = "is not read" if not older[1:] else f"and {len(older) - 1} more are not read"
        yield f"{older[0][0]} of {older[0][1]} {what}: the index names another file"
    if unlisted := sorted(name for name, _ in others if name not in named):
        yield f"the index does not list {len(unlisted)} of the tensors that are read: {unlisted[0]}"


def _read_index(index: Path) -> dict[str, set[str]]:
    values = read_object(index, SourceError, "Fetch it again.")
    where = values.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise SourceError(f"{index} is not a valid shard index: its weight_map is {shown(where)}. Fetch it again.")
    if not isinstance(values.get("metadata"), dict):
        raise SourceError(f'{index} has no metadata, which transformers needs. Add "metadata": {{}}.')
    shards: dict[str, set[str]] = {}
    for tensor, name in where.items():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name or len(name) > LONGEST_NAME:
            raise SourceError(f"{index} names the shard {shown(name)} outside its folder. Fetch it again.")
        shards.setdefault(name, set()).add(tensor)
    for name in sorted(shards):
        if not (index.parent / name).is_file():
            raise SourceError(f"{index.parent} lacks the shard {name} that its index names. Fetch it again.")
    return dict(sorted(shards.items()))


def open_checkpoint(folder: Path, model: str, revision: str | None = None) -> Checkpoint:
    """Open an unquantized checkpoint; `model` is its name in errors. Raises SourceError."""
    config, tensors = read_plain(folder, model)
    return Checkpoint(folder, model, revision, config, tensors)


def read_plain(folder: Path, model: str) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Return config.json and tensor locations; raise SourceError if the checkpoint is quantized."""
    config, tensors = read_folder(folder, model)
    if (quantization := config.get("quantization_config")) is not None:
        kind = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise SourceError(f"{model} is already quantized ({kind}). Give the unquantized model it was made from.")
    return config, tensors


def read_folder(folder: Path, model: str, only: str | None = None) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Return config.json and tensor locations of a checkpoint; `only` names a single weight file to use."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise SourceError(f"{folder} has no config.json, so it is not a checkpoint. Give the folder that has it.")
    config = read_object(config_path, SourceError, "Fetch it again.")
    if "model_type" not in config:
        raise SourceError(f"{config_path} names no model_type. Give the config.json of a causal language model.")
    tensors: dict[str, TensorInfo] = {}
    # transformers reads the files in this order, and the last tensor of a name wins: the index must agree.
    for shard, promised in _shards(folder, only).items():
        found = read_header(folder / shard)
        if twice := sorted((found.keys() & tensors.keys()) - promised):
            raise SourceError(
                f"{folder} has the tensor {twice[0]} twice, in {tensors[twice[0]].file} and in {shard}: transformers "
                "uses the last one, and no index names it. Remove one of the two."
            )
        if missing := sorted(promised - found.keys()):
            other = tensors.get(missing[0])
            how = f"{shard} lacks" if other is None else f"{other.file} holds"
            raise SourceError(
                f"{folder}/{how} the tensor {missing[0]}, but the index says otherwise. Fetch the index and all shards "
                "of one revision again."
            )
        tensors.update(found)
    if not tensors:
        raise SourceError(f"{folder} has no tensors. Fetch the checkpoint again.")
    refuse_config(config, len(tensors))
    refuse_side_files(folder)
    if (generation := folder / GENERATION).is_file():
        refuse_token_ids(read_object(generation, SourceError, "Fetch it again."), str(generation))
    return config, tensors


class _Reader:
    def __init__(self, folder: Path, files: tuple[str, ...], _config: dict[str, Any]) -> None:
        try:
            _, tensors = read_plain(folder, str(folder))
            self._checkpoint = Checkpoint(folder, str(folder), None, {}, tensors)
        except (SourceError, UnsupportedError, OSError) as error:
            raise ArtifactError(f"{folder} cannot be read: {str(error).rstrip('.')}. Convert again.") from None
        if set(self._checkpoint.weight_files) != set(files):
            raise ArtifactError(f"{folder} has other weight files than {', '.join(files)}. Convert again.")

    def names(self) -> list[str]:
        return sorted(self._checkpoint.tensors)

    def read(self, name: str) -> Rows:
        return self._checkpoint.in_rows(name)

    def types(self) -> Mapping[str, int]:
        return Counter(DTYPES[info.dtype] for info in self._checkpoint.tensors.values())


class _Writer(TensorWriter):
    dtype = "float16"

    def add(self, name: str, value: Written) -> None:
        """Write a tensor, rounded to the layout's dtype a slab of rows at a time."""
        import torch

        from quantkit.numerics.grid import cast_finite

        rows = rows_in_memory(value) if isinstance(value, torch.Tensor) else value
        if not isinstance(rows, Rows):
            return super().add(name, value)
        dtype, what = getattr(torch, self.dtype), f"{name} of {self.source.model}"
        pieces = (cast_finite(torch.from_numpy(piece), dtype, what) for _, piece in rows.pieces(PIECE))
        self.checkpoint.add_pieces(name, dtype, rows.shape, pieces)
        self.run.findings.count(self.dtype)


def _check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked[Layout]:
    from quantkit.models.skeleton import refuse_shapes

    refuse_shapes(source, skeleton)
    return Checked(layout, source.parameters * ITEM_BYTES[layout.dtype] + 50_000_000)


@contextmanager
def _write(source: Source, _skeleton: Skeleton, run: Run, layout: Layout) -> Iterator[_Writer]:
    from quantkit.checkpoints.spool import open_writer

    with open_writer(run.folder, source, layout.dtype, None) as checkpoint:
        writer = _Writer(checkpoint, source, run)
        writer.dtype = layout.dtype
        yield writer


def _recorded_options(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    return {"bits": (refuse_other_dtypes(artifact.folder, artifact.manifest.tensor_types),)}


def _recognizes(path: Path) -> bool:
    try:
        read_plain(path, str(path))
    except (QuantkitError, OSError):
        return False
    return True


FORMAT = Format(
    name="float",
    summary="plain safetensors of floats",
    reference="https://github.com/huggingface/safetensors",
    holds=(Content.FLOATS,),
    loading={
        "transformers": Loading("5.23", values=True),
        "reference": Loading(),
        "vllm": Loading("0.32"),
        "mlx": Loading("0.32"),
    },
    kinds=(Kind("float16"), Kind("bfloat16"), Kind("float32")),
    servers={"sglang": "", "tgi": "", "exllama": ""},
    recognizes=_recognizes,
    open=_Reader,
    check=_check,
    writer=_write,
    recorded_options=_recorded_options,
)
