"""compressed-tensors with several groups of layers, such as 4 bits for some and FP8 for others: sources only.

config.json says by names, expressions or classes which group a layer belongs to. Here its tensors say it: their types
and shapes fit one group, or several that give the same values, or the folder is refused. So no expression of a
stranger's is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.format import Layout, QuantizedReader
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats._grouped import GroupedReader
from quantkit.formats._source_settings import source_settings
from quantkit.formats.compressed_tensors.scaled import BESIDE, DIVISOR, ScaledReader
from quantkit.formats.compressed_tensors.schemes import CLASS, FLOAT4, HEAD, is_scaled, scheme_of

if TYPE_CHECKING:
    import torch

    from quantkit.numerics.grouped_weight import GroupedWeight
    from quantkit.numerics.scaled_weight import ScaledWeight

MIXED = "mixed-precision"  # the format where each group names its own
MOST_GROUPS = 64
AGAIN = "Fetch the checkpoint again."
Reader = GroupedReader | ScaledReader
ReadOne = Callable[[Mapping[str, Any], Collection[str]], Reader]
# Kinds of layers, which have other parts: by the part with the codes, and its type.
KINDS = {
    ("weight_packed", "int32"): "packed codes",
    ("weight_packed", "uint8"): "4-bit floats",
    ("weight", "int8"): "8 bits",
    ("weight", "float8_e4m3fn"): "8 bits",
}
PARTS = {
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    DIVISOR,
    *BESIDE,
}


def one_by_one(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A `quantization_config` of one group for each of its groups; itself where it has none."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return [quantization]
    if len(groups) > MOST_GROUPS:
        raise ArtifactError(f"config_groups has {len(groups)} groups; at most {MOST_GROUPS} are read. {AGAIN}")
    whole = quantization.get("format")
    single: list[Mapping[str, Any]] = []
    for name, group in groups.items():
        own = group.get("format") if isinstance(group, dict) and whole == MIXED else whole
        single.append({**quantization, "format": own, "config_groups": {name: group}})
    return single


def refuse_other_groups(quantization: Mapping[str, Any], folder: Path) -> None:
    """Raise ArtifactError for groups that we did not write: of all layers and perhaps of the head, or by names."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) < 2:
        return
    first = groups.get("group_0")
    if isinstance(first, dict) and first.get("targets") != [CLASS]:
        return  # every layer has to be named, which the bits of each show
    head = groups.get("group_1")
    if groups.keys() != {"group_0", "group_1"} or not isinstance(head, dict) or head.get("targets") != [HEAD]:
        raise ArtifactError(
            f"{folder / 'config.json'}: config_groups has {len(groups)} groups, and the second one is not that of the "
            f"module {HEAD}. Convert again with --force."
        )


def open_groups(read_one: ReadOne, folder: Path, files: tuple[str, ...]) -> QuantizedReader:
    """The reader of a folder; `read_one` gives that of one `quantization_config` of one group, without some tensors."""
    groups = one_by_one(source_settings(folder)[1] or {})
    kinds = [_kind_of(single) for single in groups]
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
        reader = read_one(single, others.get(kind, ()))
        readers.setdefault((kind, reader.kind), reader)
    first, *rest = readers.values()
    return GroupsReader([first, *rest], folder) if rest else first


def _kind_of(single: Mapping[str, Any]) -> str:
    """Which of `KINDS` the layers of a group are."""
    if not is_scaled(single):
        return "packed codes"
    return "4-bit floats" if scheme_of(single, own=False).values in FLOAT4 else "8 bits"


def _parts(stored: StoredTensors, folder: Path) -> dict[str, set[str]]:
    """The names of the tensors of layers by their kind; raises ArtifactError for a layer of two kinds."""
    names = stored.names()
    layers: dict[str, str] = {}
    for name in names:
        stem, _, leaf = name.rpartition(".")
        if (kind := KINDS.get((leaf, stored.dtype(name)))) is None:
            continue
        if layers.setdefault(stem, kind) != kind:
            raise ArtifactError(f"{folder} has the layer {stem} twice, as {layers[stem]} and as {kind}. {AGAIN}")
    found: dict[str, set[str]] = {kind: set() for kind in layers.values()}
    for name in names:
        stem, _, leaf = name.rpartition(".")
        if stem in layers and leaf in PARTS:
            found[layers[stem]].add(name)
    return found


class GroupsReader:
    """The layers of several groups, each read as its tensors' types and shapes fit."""

    def __init__(self, readers: list[Reader], folder: Path) -> None:
        self._folder, self._readers, self._first = folder, readers, readers[0]
        self._of: dict[str, Reader] = {}
        for name in self.names():
            if owners := [reader for reader in readers if reader.quantized_shape(name) is not None]:
                self._of[name] = self._fitting(name, owners)

    def _fitting(self, name: str, owners: list[Reader]) -> Reader:
        """Its group; of several the first, where the values are the same."""
        fitting = {reader: values for reader in owners if (values := reader.fits(name)) is not None}
        if len(set(fitting.values())) != 1:
            kinds = "; ".join(reader.quantization().partition(", ")[2] for reader in self._readers)
            which = "several" if fitting else "none"
            raise ArtifactError(
                f"{self._folder}: the parts of {name} fit {which} of the groups of config.json ({kinds}). {AGAIN}"
            )
        return next(iter(fitting))

    def names(self) -> list[str]:
        """The tensors' names in the source."""
        return sorted({name for reader in self._readers for name in reader.names()})

    def read(self, name: str) -> torch.Tensor | GroupedWeight | ScaledWeight:
        """One of them; raises ArtifactError for parts that do not belong together."""
        return self._of.get(name, self._first).read(name)

    def types(self) -> Mapping[str, int]:
        """Layers by what their codes or values are, and dense tensors by their type."""
        return Counter(self._of.get(name, self._first).type_of(name) for name in self.names())

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape (N, K) of a quantized layer's values; None for a dense tensor."""
        return self._of.get(name, self._first).quantized_shape(name)

    def quantization(self) -> str:
        """What the groups are called, one after the other."""
        first, *others = (reader.quantization() for reader in self._readers)
        return "; ".join([first, *(other.partition(", ")[2] for other in others)])

    def layout(self) -> Layout:
        """There is none: the layouts of codes that are written have one group."""
        raise UnsupportedError(
            f"{self._folder} has layers of several kinds ({self.quantization()}), and keep writes one kind only"
        )
