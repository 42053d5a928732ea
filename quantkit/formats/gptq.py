"""The GPTQ layout, version 1. Loaded by vLLM, exllama, and transformers with gptqmodel.

Per linear layer with weight (N, K) and bits b: `qweight` int32 [K*b/32, N]; `qzeros` int32 [G, N*b/32] with
zero - 1 (so a zero of 0 cannot be stored); `scales` float16 [G, N]; `g_idx` int32 [K].
Mixed bits are recorded as in GPTQModel: config.json's `dynamic` maps regular expressions of layer names to settings,
and the first match counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from quantkit.contracts.format import Content, Format, Layout, Loading
from quantkit.contracts.run import Run
from quantkit.errors import ArtifactError
from quantkit.formats import _grouped_codes as grouped
from quantkit.formats._bit_packing import codes_per_unit, pack_columns, pack_rows, unpack_columns, unpack_rows
from quantkit.formats._grouped_codes import OTHERS, GroupedPacking
from quantkit.formats._packed_layers import AGAIN, LayerWriter, Parts, StoredLayer
from quantkit.formats._quantization_config import (
    GPTQ_FILE,
    VERSION_KEYS,
    Untouched,
    gpus_only,
    layer_overrides,
    quantization_of,
    recognizes,
)
from quantkit.models.skeleton import Skeleton
from quantkit.models.source import Source
from quantkit.numerics.quantized_weight import GroupedWeight
from quantkit.records.artifact import Artifact
from quantkit.system.untrusted import read_object, shown

VERSIONS = {"gptq": 1, "gptq_v2": 0}  # subtracted from stored zero points
NOT_IN_VLLM = (
    "vLLM loads only symmetric GPTQ files of 4 and 8 bits without desc_act; with --format compressed-tensors it also "
    "loads 2 and 3 bits (on GPUs) and zero points"
)
HEAD_READERS = "vLLM and GPTQModel find the quantized output head; transformers' own loader of GPTQ does not"
# vLLM's names of layers that it fuses: it matches these names, not the parts' names.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class _GptqPacking(GroupedPacking):
    """GPTQ's packing along the input dimension; `shift` (version 2: 0) is subtracted from stored zero points.

    `bits_by_zeros`: config.json lacks some layers' bits, so they are inferred from the tensors (other tools' files).
    """

    name = "gptq"
    bits = (2, 3, 4, 8)
    parts = ("qweight", "qzeros", "scales", "g_idx")
    order, orders_columns = "g_idx", True
    least_zero = 1

    def __init__(self, shift: int = 1, bits_by_zeros: bool = False) -> None:
        self._shift, self._bits_by_zeros = shift, bits_by_zeros

    def stored(self, rows: int, columns: int, groups: int, kind: Layout) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {
            "qweight": ("int32", (columns * kind.bits // 32, rows)),
            "qzeros": ("int32", (groups, rows * kind.bits // 32)),
            "scales": ("float16", (groups, rows)),
            "g_idx": ("int32", (columns,)),
        }

    def pack_codes(self, weight: GroupedWeight, _layout: Layout) -> dict[str, torch.Tensor]:
        return {
            "qweight": pack_rows(weight.codes.T, weight.bits),
            "qzeros": pack_columns(weight.zeros.T - self._shift, weight.bits),
            "g_idx": weight.g_idx.to(torch.int32),
        }

    def unpack_codes(self, parts: Parts, bits: int) -> torch.Tensor:
        return unpack_rows(parts["qweight"], bits).T.contiguous()

    def unpack_zeros(self, parts: Parts, bits: int, _rows: int, _groups: int) -> torch.Tensor:
        zeros = unpack_columns(parts["qzeros"], bits).to(torch.int16) + self._shift
        if int(zeros.max()) >= 1 << bits:  # some tools write 0 - 1 as the largest code; readers differ
            raise ArtifactError(f"qzeros have zero points of {1 << bits}, which are not codes of {bits} bits. {AGAIN}")
        return zeros.to(torch.uint8).T.contiguous()

    def refusal(self, name: str, rows: int, columns: int, bits: int) -> str | None:
        unit = codes_per_unit(bits)
        if rows % unit or columns % unit:
            return f"{name} has {rows} x {columns} weights; {bits}-bit words need multiples of {unit} in both"
        return None

    def quantization(self, layout: Layout, untouched: Untouched) -> dict[str, Any]:
        """Return GPTQModel's settings; in `dynamic`, a leading minus excludes layers, a plus sets their bits."""
        dynamic: dict[str, Any] = {f"-:{pattern}": {} for pattern in untouched.patterns}
        others = {name: bits for name, bits in layout.layer_bits.items() if bits != layout.bits}
        dynamic |= {_pattern(name): {"bits": bits} for name, bits in (others | _joined(others)).items()}
        return {
            "quant_method": "gptq",
            "bits": layout.bits,
            "group_size": layout.group_size,
            "checkpoint_format": "gptq",
            "lm_head": layout.head_bits is not None,
            "sym": layout.symmetric,
            "desc_act": layout.column_order,
            **({"dynamic": dynamic} if dynamic else {}),
            **(layout.settings or {}),
        }

    def head_bits(self, layout: Layout) -> tuple[int, ...]:
        alike = len(layout.every_bits) == 1 and not layout.column_order
        return (layout.bits,) if layout.bits in (4, 8) and alike else ()

    def layer_bits(self, quantization: Mapping[str, Any]) -> Mapping[str, int]:
        dynamic = quantization.get("dynamic") or {}
        if not isinstance(dynamic, dict):
            raise ArtifactError(f"quantization_config: dynamic is {shown(dynamic)}, not a mapping. {AGAIN}")
        bits: dict[str, int] = {}
        for pattern, value in dynamic.items():
            if pattern.startswith("-:"):
                continue
            name = re.sub(r"\\(.)", r"\1", pattern.removeprefix("+:").removesuffix("$"))
            own = value.get("bits") if isinstance(value, dict) and len(value) == 1 else None
            if pattern != _pattern(name) or type(own) is not int or own not in self.bits:
                raise ArtifactError(
                    f"quantization_config: dynamic has {shown(pattern)}: {shown(value)}, not a layer's name with "
                    f"its bits. {AGAIN}"
                )
            bits[name] = own
        return {**bits, OTHERS: quantization.get("bits", 0)} if bits else {}

    def bits_of(self, layer: StoredLayer) -> int:
        bits = super().bits_of(layer)
        if not self._bits_by_zeros:
            return bits
        own = layer.matrix("qzeros")[1] * 32 // max(1, layer.matrix(self.scales)[1])
        return own if own in self.bits else bits

    def variant(self, quantization: Mapping[str, Any]) -> GroupedPacking:
        version = next((quantization[key] for key in VERSION_KEYS if quantization.get(key)), "gptq")
        if not isinstance(version, str) or version not in VERSIONS:
            raise ArtifactError(
                f"the checkpoint_format {shown(version)} is not supported, only gptq and gptq_v2 are. Give the "
                "unquantized model."
            )
        return _GptqPacking(VERSIONS[version], bool(layer_overrides(quantization)))

    def notes(self, layout: Layout) -> tuple[str, ...]:
        notes = (NOT_IN_VLLM,) if layout.column_order or not layout.symmetric else ()
        return (*notes, HEAD_READERS) if layout.head_bits is not None else notes


def _pattern(name: str) -> str:
    return f"+:{re.escape(name)}$"


def _joined(bits: Mapping[str, int]) -> dict[str, int]:
    """Return bits under the names that vLLM gives to fused layers, such as `qkv_proj`."""
    found: dict[str, int] = {}
    for name, width in bits.items():
        place, _, leaf = name.rpartition(".")
        for joined, parts in JOINED.items():
            if leaf == parts[0] and all(bits.get(f"{place}.{part}") == width for part in parts):
                found[f"{place}.{joined}"] = width
    return found


PACKING = _GptqPacking()


@contextmanager
def _write(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> Iterator[LayerWriter[GroupedWeight]]:
    with grouped.write(PACKING, source, skeleton, run, layout) as writer:
        yield writer
    text = json.dumps(quantization_of(run.folder), indent=2, sort_keys=True) + "\n"
    (run.folder / GPTQ_FILE).write_text(text, encoding="utf-8")


def _recorded_options(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    """Read options from config.json; raise ArtifactError if quantize_config.json differs from it."""
    path, settings = artifact.folder / GPTQ_FILE, quantization_of(artifact.folder)
    if GPTQ_FILE in artifact.manifest.files:
        copy = read_object(path, ArtifactError, AGAIN)
        for name in sorted(copy.keys() | settings.keys()):
            if copy.get(name) != settings.get(name):
                one, other = shown(copy.get(name)), shown(settings.get(name))
                raise ArtifactError(f"{path}: {name} is {one}, and {other} in config.json. {AGAIN}")
    said = grouped.recorded_options(PACKING, artifact)
    return {**said, "head_bits": (int(str(said["bits"][0])) if settings.get("lm_head") is True else None,)}


def _refusals(quantization: Mapping[str, Any]) -> Mapping[str, str]:
    dynamic = quantization.get("dynamic")
    others = dynamic.values() if isinstance(dynamic, dict) else ()
    every = {quantization.get("bits"), *(part["bits"] for part in others if isinstance(part, dict) and "bits" in part)}
    reasons = {"transformers": grouped.NEEDS_GPTQMODEL}
    if quantization.get("desc_act") or not quantization.get("sym", True) or not every <= {4, 8}:
        reasons["vllm"] = NOT_IN_VLLM
    elif 8 in every:
        reasons |= gpus_only("0.23", "mixed_precision/marlin")
    if every != {4}:
        reasons["exllama"] = "exllama loads only GPTQ files of 4 bits"
    return reasons


FORMAT = Format(
    name="gptq",
    summary="grouped integer codes in GPTQ's layout",
    reference="https://github.com/ModelCloud/GPTQModel",
    holds=(Content.GROUPED_CODES,),
    loading={"reference": grouped.IN_REFERENCE, "vllm": Loading("0.32")},
    recognizes=partial(recognizes, "gptq"),
    open=partial(grouped.open_grouped, PACKING),
    check=partial(grouped.check, PACKING),
    writer=_write,
    open_quantized=partial(grouped.open_grouped, PACKING, own=False),
    kinds=(*grouped.kinds(PACKING), *grouped.mixes(PACKING)),
    refusals=_refusals,
    servers={"sglang": "", "tgi": "--quantize gptq", "exllama": ""},
    recorded_options=_recorded_options,
    usage=grouped.usage("optimum gptqmodel", "vLLM (symmetric artifacts of 4 and 8 bits without `desc_act`)"),
)
