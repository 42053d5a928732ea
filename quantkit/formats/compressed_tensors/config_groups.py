"""compressed-tensors with several groups of layers, such as 4 bits for some and 8 for others: sources only.

config.json says by names, expressions or classes which group a layer belongs to. Here its tensors say it: their shapes
fit the bits and the group size of one group, or the folder is refused. So no expression of a stranger's is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.contracts.format import Layout, QuantizedReader
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats._grouped import GroupedReader
from quantkit.formats._quantization_config import quantization_of
from quantkit.formats.compressed_tensors.schemes import HEAD

if TYPE_CHECKING:
    import torch

    from quantkit.numerics.grouped_weight import GroupedWeight

MIXED = "mixed-precision"  # the format where each group names its own
MOST_GROUPS = 64
AGAIN = "Fetch the checkpoint again."
ReadOne = Callable[[Mapping[str, Any]], GroupedReader]


def one_by_one(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A `quantization_config` of one group for each of its groups; itself where it has one or none."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) < 2:
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
    """Raise ArtifactError for groups that we did not write: one of layers, and perhaps a second one of the head."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) < 2:
        return
    head = groups.get("group_1")
    if groups.keys() != {"group_0", "group_1"} or not isinstance(head, dict) or head.get("targets") != [HEAD]:
        raise ArtifactError(
            f"{folder / 'config.json'}: config_groups has {len(groups)} groups, and the second one is not that of the "
            f"module {HEAD}. Convert again with --force."
        )


def open_groups(read_one: ReadOne, folder: Path) -> QuantizedReader:
    """The reader of a folder; `read_one` gives that of one `quantization_config` of one group."""
    readers: dict[object, GroupedReader] = {}
    for single in one_by_one(quantization_of(folder)):
        reader = read_one(single)
        readers.setdefault(reader.kind, reader)
    first, *others = readers.values()
    return GroupsReader([first, *others], folder) if others else first


class GroupsReader:
    """The layers of several groups, each read as its tensors' shapes fit."""

    def __init__(self, readers: list[GroupedReader], folder: Path) -> None:
        self._folder, self._readers, self._first = folder, readers, readers[0]
        layers = [name for name in self._first.names() if self._first.quantized_shape(name) is not None]
        self._of = {name: self._fitting(name) for name in layers}

    def _fitting(self, name: str) -> GroupedReader:
        """Its group; with as many bits another one that fits has the same values."""
        fitting = [reader for reader in self._readers if reader.fits(name)]
        if len({reader.kind[0] for reader in fitting}) != 1:
            kinds = "; ".join(reader.quantization().partition(", ")[2] for reader in self._readers)
            which = "several" if fitting else "none"
            raise ArtifactError(
                f"{self._folder}: the parts of {name} fit {which} of the groups of config.json ({kinds}). {AGAIN}"
            )
        return fitting[0]

    def names(self) -> list[str]:
        """The tensors' names in the source."""
        return self._first.names()

    def read(self, name: str) -> torch.Tensor | GroupedWeight:
        """One of them; raises ArtifactError for parts that do not belong together."""
        return self._of.get(name, self._first).read(name)

    def types(self) -> Mapping[str, int]:
        """Layers by the bits of their codes, and dense tensors by their type."""
        return Counter(self._of.get(name, self._first).type_of(name) for name in self.names())

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape (N, K) of a quantized layer's values; None for a dense tensor."""
        return self._of.get(name, self._first).quantized_shape(name)

    def quantization(self) -> str:
        """What the groups are called, one after the other."""
        first, *others = (reader.quantization() for reader in self._readers)
        return "; ".join([first, *(other.partition(", ")[2] for other in others)])

    def layout(self) -> Layout:
        """There is none: the layouts of grouped codes that are written have one group."""
        raise UnsupportedError(
            f"{self._folder} has layers of several kinds ({self.quantization()}), and files have one"
        )
