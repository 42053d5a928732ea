"""compressed-tensors, as vLLM's own tools write it: grouped integer codes, and scaled 8-bit and 4-bit values.

`pack-quantized` is packed.py; `int-quantized`, `float-quantized`, `nvfp4-pack-quantized` and `mxfp4-pack-quantized` are
scaled.py. Format: https://github.com/vllm-project/compressed-tensors, version 0.20.
Loaded by vLLM and by transformers with the package compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.artifact import Artifact
from quantkit.contracts.format import Format, Layout, QuantizedReader, TensorWriter
from quantkit.contracts.run import Checked, Run
from quantkit.formats import _grouped as grouped
from quantkit.formats._grouped_layout import kinds, mixes
from quantkit.formats._grouped_tells import tells
from quantkit.formats._quantization_config import quantization_of, recognizes
from quantkit.formats.compressed_tensors import packed, scaled
from quantkit.formats.compressed_tensors.config_groups import one_by_one, open_groups, refuse_other_groups
from quantkit.formats.compressed_tensors.packed import PACKING
from quantkit.formats.compressed_tensors.schemes import HEAD, KINDS, METHOD, is_scaled
from quantkit.models.skeleton import Skeleton
from quantkit.models.source import Source

USAGE = """
vLLM:

```bash
vllm serve FOLDER
```

transformers, with `pip install compressed-tensors`:

{transformers}
"""


def _is_scaled(folder: Path) -> bool:
    return is_scaled(quantization_of(folder))


def _check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked:
    if layout.values == "codes":
        return grouped.check(PACKING, source, skeleton, layout)
    return scaled.check(source, skeleton, layout)


def _writer(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> AbstractContextManager[TensorWriter]:
    if layout.values == "codes":
        return grouped.write(PACKING, source, skeleton, run, layout)
    return scaled.write(source, skeleton, run, layout)


def _open(folder: Path, files: tuple[str, ...], config: dict[str, Any]) -> QuantizedReader:
    if _is_scaled(folder):
        return scaled.ScaledReader(folder, files, config)
    refuse_other_groups(quantization_of(folder), folder)
    return grouped.GroupedReader(PACKING, folder, files, config)


def _open_quantized(folder: Path, files: tuple[str, ...], config: dict[str, Any]) -> QuantizedReader:
    """Of one group of layers or several."""

    def read_one(group: Mapping[str, Any], others: Collection[str]) -> grouped.GroupedReader | scaled.ScaledReader:
        if is_scaled(group):
            return scaled.ScaledReader(folder, files, config, False, group, others)
        return grouped.GroupedReader(PACKING, folder, files, config, False, group, others)

    return open_groups(read_one, folder, files)


def _refusals(stored: Mapping[str, Any]) -> Mapping[str, str]:
    reasons: dict[str, str] = {}
    for group in one_by_one(stored):
        reasons |= scaled.refusals(group) if is_scaled(group) else packed.refusals(group)
    return reasons


def _tells(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    stored = quantization_of(artifact.folder)
    if is_scaled(stored):
        return scaled.tells(artifact)
    head = PACKING.layer_bits(stored).get(HEAD)
    return {**tells(PACKING, artifact), "head_bits": (head,)}


FORMAT = Format(
    name="compressed-tensors",
    summary="grouped integer codes, and scaled int8, FP8 and FP4 values, in compressed-tensors' layouts",
    reference="https://github.com/vllm-project/compressed-tensors",
    holds=("grouped codes", "scaled values", "mxfp4 values"),
    engines=("reference", "transformers", "vllm"),
    recognizes=partial(recognizes, METHOD),
    open=_open,
    check=_check,
    writer=_writer,
    open_quantized=_open_quantized,
    kinds=(*kinds(PACKING), *mixes(PACKING), *KINDS),
    refusals=_refusals,
    since={"reference": "", "transformers": "5.23", "vllm": "0.32"},
    servers={"sglang": "", "tgi": ""},
    tells=_tells,
    usage=USAGE,
)
