"""What config.json says of how a checkpoint was quantized: `quantization_config`, as transformers defines it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quantkit.errors import ArtifactError
from quantkit.untrusted import read_object, shown


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
