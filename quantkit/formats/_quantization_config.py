"""What config.json says of how a checkpoint was quantized: `quantization_config`, as transformers defines it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import ArtifactError
from quantkit.models.text_half import roots
from quantkit.untrusted import read_object, shown

if TYPE_CHECKING:
    from quantkit.models.skeleton import Skeleton
    from quantkit.models.source import Source


@dataclass(frozen=True)
class Untouched:
    """What is not quantized: `linears` of the model, and `modules` that readers do not leave alone by themselves.

    These hold tensors that are kept beside the model, or are layers that stay as they are. All have the names of the
    files and, where those are others, of transformers' modules.
    """

    linears: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    @property
    def patterns(self) -> tuple[str, ...]:
        """Regular expressions of the names of all inside the modules, with or without the base model's prefix."""
        bare = sorted({name.removeprefix("model.") for name in self.modules})
        return tuple(rf"(model\.)?{re.escape(name)}(\..*)?$" for name in bare)


def untouched(source: Source, skeleton: Skeleton) -> Untouched:
    """What of the source's model is not quantized."""
    from torch import nn

    quantized = skeleton.linears()
    linears = (name for name, module in skeleton.model.named_modules() if isinstance(module, nn.Linear))
    others = _named(source, skeleton, (name for name in linears if f"{name}.weight" not in quantized))
    alone = _named(source, skeleton, (name.removesuffix(".weight") for name in skeleton.left_alone()))
    outer = roots(source.passthrough, map(source.published, source.tensors))
    inside = (name if name.startswith("model.") else f"model.{name}" for name in outer)
    return Untouched(tuple(others), tuple(sorted({*outer, *inside, *alone})))


def _named(source: Source, skeleton: Skeleton, layers: Iterable[str]) -> list[str]:
    """The names that files and transformers have for layers of the skeleton."""
    found = []
    for name in layers:
        origin = skeleton.origins.get(f"{name}.weight")
        found.append(name)
        if origin is not None and name.startswith(f"{skeleton.blocks_path}."):
            found.append(origin.name.removesuffix(".weight"))
    if source.text_prefixes is not None:
        found = [place for name in found for place in source.text_prefixes.modules(name)]
    return list(dict.fromkeys(found))


def quantization_of(folder: Path) -> dict[str, Any]:
    """`quantization_config` of the config.json in `folder`; empty where there is none."""
    try:
        values = read_object(folder / "config.json", ArtifactError).get("quantization_config")
    except ArtifactError:
        return {}
    return values if isinstance(values, dict) else {}


def dtype_of(folder: Path) -> object:
    """The type that the config.json in `folder` has for everything that is not quantized."""
    return read_object(folder / "config.json", ArtifactError, "Convert again.").get("dtype")


def refuse_other_dtypes(folder: Path, dtype: object, types: Iterable[str]) -> None:
    """Raise ArtifactError where one of the stored `types` is another than config.json's: loaders would cast it."""
    for stored in types:
        if stored != dtype:
            raise ArtifactError(
                f"{folder} holds tensors in {stored}, and its config.json says {shown(dtype)}. Convert again."
            )


def recognizes(quant_method: str, path: Path) -> bool:
    """Whether `path` is a folder whose config.json names this `quant_method`."""
    return quantization_of(path).get("quant_method") == quant_method
