"""Config groups in compressed-tensors' `quantization_config`.

A config group selects layers by name, regular expression or class. quantkit does not evaluate other tools' expressions:
the tensors of a layer also determine its group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats._grouped_codes import HEAD
from quantkit.formats._quantization_config import Untouched
from quantkit.formats.compressed_tensors.kv_scales import KEY, SCHEME
from quantkit.models.skeleton import Skeleton
from quantkit.models.source import Source

METHOD = "compressed-tensors"
CLASS = "Linear"  # class of a group's modules if it names no layers
MIXED = "mixed-precision"  # a format in which each group names its own format
MOST_GROUPS = 64
Group = Mapping[str, Any]


def groups_of(stored: Mapping[str, Any]) -> list[Group]:
    """Return the config groups, or an empty list if one of them is not a mapping."""
    groups = stored.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    return found if all(isinstance(group, dict) for group in found) else []


def one_by_one(stored: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Split a `quantization_config` into one config per group."""
    groups = stored.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return [stored]
    if len(groups) > MOST_GROUPS:
        raise ArtifactError(
            f"config_groups has {len(groups)} groups; at most {MOST_GROUPS} are read. Fetch the checkpoint again."
        )
    whole = stored.get("format")
    return [
        {
            **stored,
            "format": group.get("format") if isinstance(group, dict) and whole == MIXED else whole,
            "config_groups": {name: group},
        }
        for name, group in groups.items()
    ]


def quantization(
    form: str, groups: list[dict[str, Any]], untouched: Untouched, head: bool = False, cache: bool = False
) -> dict[str, Any]:
    """Return a `quantization_config` with these groups; `head`: one is of the output head; `cache`: with its scales."""
    ignored = {*untouched.linears, *(f"re:{pattern}" for pattern in untouched.patterns), HEAD}
    return {
        "quant_method": METHOD,
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": sorted(ignored - {HEAD} if head else ignored),
    } | ({KEY: SCHEME} if cache else {})


def refuse_unfound_layers(source: Source, skeleton: Skeleton, instead: str = "") -> None:
    """Raise UnsupportedError if a layer to quantize is not a plain `Linear`, since loaders replace only those."""
    for name, origin in skeleton.origins.items():
        if origin.transposed:
            raise UnsupportedError(
                f"the architecture {source.architecture!r} has no linear layer at {name}, but readers of "
                f"{METHOD} look for one.{instead}"
            )
    for name, layer in skeleton.linears_of(0).items():
        if type(layer).__name__ != CLASS:
            raise UnsupportedError(
                f"{name} of the architecture {source.architecture!r} is a {type(layer).__name__}, which readers of "
                f"{METHOD} do not replace.{instead}"
            )
