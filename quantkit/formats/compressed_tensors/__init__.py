"""compressed-tensors, as vLLM's own tools write it: grouped integer codes, and scaled 8-bit and 4-bit values.

`pack-quantized` is packed.py; `int-quantized`, `float-quantized`, `nvfp4-pack-quantized` and `mxfp4-pack-quantized` are
scaled.py. Format: https://github.com/vllm-project/compressed-tensors, version 0.20.
Loaded by vLLM and by transformers with the package compressed-tensors.

A source may have several groups of layers, such as 4 bits for some and FP8 for others. The types and shapes of a
layer's tensors fit one group, or several that give the same values, or the folder is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.artifact import Artifact
from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.format import Content, Format, Layout, Loading, QuantizedReader, Stored, TensorWriter
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError, EngineError
from quantkit.formats import _grouped as grouped
from quantkit.formats._grouped import HEAD, GroupedReader
from quantkit.formats._quantization_config import quantization_of, recognizes, source_quantization
from quantkit.formats.compressed_tensors import packed, scaled
from quantkit.formats.compressed_tensors.config_groups import METHOD, one_by_one, refuse_unfound_layers
from quantkit.formats.compressed_tensors.packed import PACKING
from quantkit.formats.compressed_tensors.scaled import KINDS, ScaledReader, is_scaled, scheme_of
from quantkit.models.architectures.experts import expert_of
from quantkit.models.skeleton import Skeleton
from quantkit.models.source import Source

AGAIN = "Fetch the checkpoint again."
Reader = GroupedReader | ScaledReader
# Kinds of layers, which have other parts: by the part with the codes, and its type.
LAYERS = {
    ("weight_packed", "int32"): "packed codes",
    ("weight_packed", "uint8"): "4-bit floats",
    ("weight", "int8"): "8 bits",
    ("weight", "float8_e4m3fn"): "8 bits",
}
PARTS = {*PACKING.parts, "weight", scaled.DIVISOR, *scaled.BESIDE}
# By transformers 5.23 with compressed-tensors 0.20: its weights become bfloat16 whatever the model computes in.
ONLY_BFLOAT16 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
MISREAD_EXPERTS = ("int-quantized", "nvfp4-pack-quantized")


def _check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked:
    if layout.values != "codes":
        return scaled.check(source, skeleton, layout)
    refuse_unfound_layers(source, skeleton, " Take the format gptq.")
    return grouped.check(PACKING, source, skeleton, layout)


def _writer(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> AbstractContextManager[TensorWriter]:
    if layout.values == "codes":
        return grouped.write(PACKING, source, skeleton, run, layout)
    return scaled.write(source, skeleton, run, layout)


def _open(folder: Path, files: tuple[str, ...], config: dict[str, Any]) -> QuantizedReader:
    stored = quantization_of(folder)
    if is_scaled(stored):
        return ScaledReader(folder, files, stored, own=True)
    return GroupedReader(PACKING, folder, files, config)


def _open_quantized(folder: Path, files: tuple[str, ...], config: dict[str, Any]) -> QuantizedReader:
    groups = one_by_one(source_quantization(folder)[1] or {})
    kinds = [_layers_of(single) for single in groups]
    others: dict[str, set[str]] = {}
    if len(set(kinds)) > 1:
        parts = _parts(StoredTensors(folder, files), folder)
        if unread := sorted(parts.keys() - set(kinds)):
            raise ArtifactError(
                f"{folder}: {min(parts[unread[0]])} is of a layer of {unread[0]}, and config.json has no such group. "
                f"{AGAIN}"
            )
        others = {kind: {name for other, names in parts.items() if other != kind for name in names} for kind in kinds}
    readers: dict[object, Reader] = {}
    for kind, single in zip(kinds, groups, strict=True):
        beside = others.get(kind, ())
        reader = (
            ScaledReader(folder, files, single, False, beside)
            if is_scaled(single)
            else GroupedReader(PACKING, folder, files, config, False, single, beside)
        )
        readers.setdefault((kind, reader.kind), reader)
    return _GroupsReader(list(readers.values()), folder) if len(readers) > 1 else next(iter(readers.values()))


def _layers_of(single: Mapping[str, Any]) -> str:
    """Which of `LAYERS` the layers of a group are."""
    if not is_scaled(single):
        return "packed codes"
    return "4-bit floats" if scheme_of(single).kind.bits == 4 else "8 bits"


def _parts(stored: StoredTensors, folder: Path) -> dict[str, set[str]]:
    """The names of the tensors of layers by their kind; raises ArtifactError for a layer of two kinds."""
    split = [(name, *name.rpartition(".")[::2]) for name in stored.names()]
    layers: dict[str, str] = {}
    for name, stem, leaf in split:
        kind = LAYERS.get((leaf, stored.dtype(name)))
        if kind is not None and layers.setdefault(stem, kind) != kind:
            raise ArtifactError(f"{folder} has the layer {stem} twice, as {layers[stem]} and as {kind}. {AGAIN}")
    found: dict[str, set[str]] = {kind: set() for kind in layers.values()}
    for name, stem, leaf in split:
        if stem in layers and leaf in PARTS:
            found[layers[stem]].add(name)
    return found


class _GroupsReader:
    """The layers of several groups, each read as its tensors' types and shapes fit."""

    def __init__(self, readers: list[Reader], folder: Path) -> None:
        self._folder, self._readers = folder, readers
        self._of: dict[str, Reader] = {}
        for name in self.names():
            if owners := [reader for reader in readers if reader.stem_of(name) is not None]:
                self._of[name] = self._fitting(name, owners)

    def _fitting(self, name: str, owners: list[Reader]) -> Reader:
        """Its group; of several the first, where the values are the same."""
        stem = name.removesuffix("weight")
        fitting: dict[Reader, object] = {}
        for reader in owners:
            with suppress(ArtifactError):
                reader.refuse_parts(stem)
                fitting[reader] = reader.depends_on(stem)
        if len(set(fitting.values())) != 1:
            kinds = "; ".join(reader.quantization().partition(", ")[2] for reader in self._readers)
            which = "several" if fitting else "none"
            raise ArtifactError(
                f"{self._folder}: the parts of {name} fit {which} of the groups of config.json ({kinds}). {AGAIN}"
            )
        return next(iter(fitting))

    def _reader(self, name: str) -> Reader:
        return self._of.get(name, self._readers[0])

    def names(self) -> list[str]:
        return sorted({name for reader in self._readers for name in reader.names()})

    def read(self, name: str) -> Stored:
        return self._reader(name).read(name)

    def types(self) -> Mapping[str, int]:
        return Counter(self._reader(name).type_of(name) for name in self.names())

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        return self._reader(name).quantized_shape(name)

    def quantization(self) -> str:
        first, *others = (reader.quantization() for reader in self._readers)
        return "; ".join([first, *(other.partition(", ")[2] for other in others)])

    def layout(self) -> Layout:
        raise grouped.several_kinds(self._folder, self.quantization())


def _refusals(stored: Mapping[str, Any]) -> Mapping[str, str]:
    reasons: dict[str, str] = {}
    for group in one_by_one(stored):
        reasons |= scaled.refusals(group) if is_scaled(group) else packed.refusals(group)
    return reasons


def _refuse_misread(artifact: Artifact, dtype: str | None, _device: str) -> None:
    """Raise EngineError for what transformers would compute wrongly, or not at all."""
    kind = quantization_of(artifact.folder).get("format")
    if kind in ONLY_BFLOAT16 and dtype not in (None, "bfloat16"):
        raise EngineError(
            f"{artifact.folder}: compressed-tensors makes bfloat16 of {kind}, and the engine transformers cannot "
            f"compute it in {dtype}. Leave --dtype out, or judge with --engine reference."
        )
    if kind in MISREAD_EXPERTS:
        names = StoredTensors(artifact.folder, artifact.manifest.weight_files).names()
        if expert := next((name for name in names if expert_of(name)), None):
            raise EngineError(
                f"{artifact.folder}: transformers stacks experts, and reads those of {kind}, such as {expert}, wrongly "
                "or not at all. Judge with --engine reference."
            )


def _recorded_options(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    stored = quantization_of(artifact.folder)
    if is_scaled(stored):
        return scaled.recorded_options(artifact)
    return {**grouped.recorded_options(PACKING, artifact), "head_bits": (PACKING.layer_bits(stored).get(HEAD),)}


FORMAT = Format(
    name=METHOD,
    summary="grouped integer codes, and scaled int8, FP8 and FP4 values, in compressed-tensors' layouts",
    reference="https://github.com/vllm-project/compressed-tensors",
    holds=(Content.GROUPED_CODES, Content.SCALED_VALUES, Content.MXFP4_VALUES),
    loading={
        "reference": Loading(weights="packed", packed_bits=("2", "3", "4", "8")),
        "transformers": Loading("5.23", "compressed_tensors", "both", refuse=_refuse_misread),
        "vllm": Loading("0.32"),
    },
    recognizes=partial(recognizes, METHOD),
    open=_open,
    check=_check,
    writer=_writer,
    open_quantized=_open_quantized,
    kinds=(*grouped.kinds(PACKING), *grouped.mixes(PACKING), *KINDS),
    refusals=_refusals,
    recorded_options=_recorded_options,
    usage=grouped.usage("compressed-tensors"),
)
