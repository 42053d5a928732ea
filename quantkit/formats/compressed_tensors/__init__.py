"""compressed-tensors, vLLM's native format: grouped integer codes (packed.py), scaled 8- and 4-bit values (scaled.py).

Format: https://github.com/vllm-project/compressed-tensors, version 0.20. If a source's config defines several groups of
layers, the dtypes and shapes of a layer's tensors determine its group.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.format import Content, Format, Layout, Loading, QuantizedReader, TensorWriter
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError, EngineError
from quantkit.formats import _grouped_codes as grouped
from quantkit.formats._grouped_codes import HEAD
from quantkit.formats._packed_layers import AGAIN, LayerReader, Packing
from quantkit.formats._quantization_config import quantization_of, recognizes, source_quantization
from quantkit.formats.compressed_tensors import packed, scaled
from quantkit.formats.compressed_tensors.groups import METHOD, one_by_one, refuse_unfound_layers
from quantkit.formats.compressed_tensors.kv_scales import KEY, kv_scales, without_scales
from quantkit.formats.compressed_tensors.packed import PACKING
from quantkit.formats.compressed_tensors.scaled import KINDS, ScaledPacking, is_scaled, scheme_of
from quantkit.models.attention import refuse_own_attention
from quantkit.models.skeleton import Skeleton
from quantkit.models.source import Source
from quantkit.models.unfuse import expert_of
from quantkit.records.artifact import Artifact

# transformers 5.23 with compressed-tensors 0.20 always makes its weights bfloat16.
ONLY_BFLOAT16 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
MISREAD_EXPERTS = ("int-quantized", "nvfp4-pack-quantized")
ROUNDED = "engines round its key-value cache to FP8; the engine reference does so with --kv-cache fp8"


def _check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked[Layout]:
    if layout.kv_scales:
        refuse_own_attention(skeleton.model)
    if layout.values != "codes":
        checked = scaled.check(source, skeleton, layout)
    else:
        refuse_unfound_layers(source, skeleton, " Use --format gptq.")
        checked = grouped.check(PACKING, source, skeleton, layout)
    return replace(checked, notes=(*checked.notes, ROUNDED)) if layout.kv_scales else checked


def _writer(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> AbstractContextManager[TensorWriter]:
    if layout.values == "codes":
        return grouped.write(PACKING, source, skeleton, run, layout)
    return scaled.write(source, skeleton, run, layout)


def _open(folder: Path, files: tuple[str, ...], config: dict[str, Any]) -> QuantizedReader:
    stored = quantization_of(folder)
    if is_scaled(stored):
        reader = LayerReader(folder, files, [ScaledPacking(scheme_of(stored, own=True))])
    else:
        reader = grouped.open_grouped(PACKING, folder, files, config)
    if kv_scales(folder, files) == {}:
        raise ArtifactError(f"{folder} has no scales for its {KEY}. {AGAIN}")
    return without_scales(reader)


def _open_quantized(folder: Path, files: tuple[str, ...], _config: dict[str, Any]) -> QuantizedReader:
    packings: dict[object, Packing[Any]] = {}
    for group in one_by_one(source_quantization(folder)[1] or {}):
        if is_scaled(group):
            packings.setdefault(scheme := scheme_of(group), ScaledPacking(scheme, own=False))
        else:
            packing = PACKING.of_folder(folder, False, group)
            packings.setdefault(packing.key, packing)
    return without_scales(LayerReader(folder, files, list(packings.values())))


def _refusals(stored: Mapping[str, Any]) -> Mapping[str, str]:
    reasons: dict[str, str] = {}
    for group in one_by_one(stored):
        for key, reason in (scaled.refusals(group) if is_scaled(group) else packed.refusals(group)).items():
            reasons[key] = max(reason, reasons.get(key, ""))  # the newest version that a group needs
    return reasons


def _refuse_misread(artifact: Artifact, dtype: str | None, _device: str) -> None:
    """Raise EngineError if transformers would load this artifact wrongly or not at all."""
    kind = quantization_of(artifact.folder).get("format")
    if kind in ONLY_BFLOAT16 and dtype not in (None, "bfloat16"):
        raise EngineError(
            f"{artifact.folder}: compressed-tensors turns {kind} into bfloat16, so the engine transformers cannot "
            f"compute it in {dtype}. Leave --dtype out, or give --engine reference."
        )
    if kind in MISREAD_EXPERTS:
        names = StoredTensors(artifact.folder, artifact.manifest.weight_files).names()
        if expert := next((name for name in names if expert_of(name)), None):
            raise EngineError(
                f"{artifact.folder}: transformers stacks experts, and reads those of {kind}, such as {expert}, wrongly "
                "or not at all. Evaluate with --engine reference."
            )


def _recorded_options(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    stored = quantization_of(artifact.folder)
    cache = {"kv_scales": (stored.get(KEY) is not None,)}
    if is_scaled(stored):
        return {**scaled.recorded_options(artifact), **cache}
    head = {"head_bits": (PACKING.layer_bits(stored).get(HEAD),)}
    return {**grouped.recorded_options(PACKING, artifact), **head, **cache}


FORMAT = Format(
    name=METHOD,
    summary="grouped integer codes, and scaled int8, FP8 and FP4 values, in compressed-tensors' layouts",
    reference="https://github.com/vllm-project/compressed-tensors",
    holds=(Content.GROUPED_CODES, Content.SCALED_VALUES, Content.MXFP4_VALUES),
    loading={
        "reference": Loading(weights="packed", packed_bits=("2", "3", "4", "8")),
        "transformers": Loading("5.23", "compressed_tensors", "both", rounds_cache=True, refuse=_refuse_misread),
        "vllm": Loading("0.32", rounds_cache=True),
    },
    recognizes=partial(recognizes, METHOD),
    open=_open,
    check=_check,
    writer=_writer,
    open_quantized=_open_quantized,
    kv_scales=kv_scales,
    kinds=(*grouped.kinds(PACKING), *grouped.mixes(PACKING), *KINDS),
    refusals=_refusals,
    servers={"sglang": "", "tgi": ""},
    recorded_options=_recorded_options,
    usage=grouped.usage("compressed-tensors"),
)
