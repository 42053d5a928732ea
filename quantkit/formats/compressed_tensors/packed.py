"""compressed-tensors' `pack-quantized` layout: grouped integer codes.

Per linear layer with weight (N, K) and bits b: `weight_packed` int32 [N, ceil(K*b/32)], each row one little-endian bit
string of codes; `weight_scale` float16 [N, G]; `weight_shape` int64 [2]; with zero points `weight_zero_point` int32
[ceil(N*b/32), G], packed along N. Stored codes are unsigned (signed code + 2^(b-1)), as in quantkit. `weight_g_idx`
int32 [K], from older versions, is read but not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.contracts.format import Layout
from quantkit.errors import ArtifactError
from quantkit.formats._bit_packing import pack_string, unpack_string, words
from quantkit.formats._grouped_codes import HEAD, OTHERS, GroupedPacking
from quantkit.formats._packed_layers import AGAIN, Parts, StoredLayer
from quantkit.formats._quantization_config import Untouched, gpus_only
from quantkit.formats.compressed_tensors.groups import CLASS, METHOD, Group, groups_of, quantization
from quantkit.numerics.quantized_weight import GroupedWeight
from quantkit.system.untrusted import shown

KIND = "pack-quantized"
CODES, SCALES, SHAPE = "weight_packed", "weight_scale", "weight_shape"
ZEROS, ORDER = "weight_zero_point", "weight_g_idx"
MOST_SIDE = 1 << 31  # rows or columns of a layer


class _CompressedPacking(GroupedPacking):
    """Packing of each row as one bit string; the last word of a row is zero-padded."""

    name = METHOD
    bits = (2, 3, 4, 8)
    codes, scales = CODES, SCALES
    marks = (CODES,)
    parts = (CODES, SCALES, SHAPE, ZEROS, ORDER)
    order = ORDER
    transposed = False

    def stored(self, rows: int, columns: int, groups: int, kind: Layout) -> dict[str, tuple[str, tuple[int, ...]]]:
        parts: dict[str, tuple[str, tuple[int, ...]]] = {
            CODES: ("int32", (rows, words(columns, kind.bits))),
            SCALES: ("float16", (rows, groups)),
            SHAPE: ("int64", (2,)),
        }
        if not kind.symmetric:
            parts[ZEROS] = ("int32", (words(rows, kind.bits), groups))
        if kind.column_order:
            parts[ORDER] = ("int32", (columns,))
        return parts

    def pack_codes(self, weight: GroupedWeight, layout: Layout) -> dict[str, torch.Tensor]:
        parts = {CODES: pack_string(weight.codes, weight.bits), SHAPE: torch.tensor(weight.shape)}
        if not layout.symmetric:
            parts[ZEROS] = pack_string(weight.zeros.T, weight.bits).T.contiguous()
        return parts

    def unpack_codes(self, parts: Parts, bits: int) -> torch.Tensor:
        return unpack_string(parts[CODES], bits, int(parts[SHAPE][1]))

    def unpack_zeros(self, parts: Parts, bits: int, rows: int, groups: int) -> torch.Tensor:
        if ZEROS in parts:
            return unpack_string(parts[ZEROS].T, bits, rows).T.contiguous()
        return torch.full((rows, groups), 1 << (bits - 1), dtype=torch.uint8)

    def join(self, pieces: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        rows = sum(int(piece[SHAPE][0]) for piece in pieces)
        return super().join(pieces) | {SHAPE: torch.tensor([rows, int(pieces[0][SHAPE][1])])}

    def size(self, layer: StoredLayer, _bits: int) -> tuple[int, int, int]:
        """Return N, K and G; N and K are read from `weight_shape`, since padded words do not determine K."""
        name = layer.stem + SHAPE
        if layer.shape(SHAPE) != (2,) or layer.dtype(SHAPE) != "int64":
            raise ArtifactError(f"{name} is not a pair of int64. {AGAIN}")
        rows, columns = layer.read([SHAPE])[SHAPE].tolist()
        if not (0 < rows < MOST_SIDE and 0 < columns < MOST_SIDE):
            raise ArtifactError(f"{name} says {rows} x {columns}. {AGAIN}")
        return rows, columns, layer.matrix(SCALES)[1]

    def quantization(self, layout: Layout, untouched: Untouched) -> dict[str, Any]:
        """Return a config with one group for all linear layers except `untouched`, or groups by name if bits differ.

        Groups by class would fail in vLLM: it matches a fused class such as QKVParallelLinear before its parts' names.
        """
        whole_row = layout.group_size == -1
        weights = {
            "type": "int",
            "symmetric": layout.symmetric,
            "strategy": "channel" if whole_row else "group",
            "group_size": None if whole_row else layout.group_size,
            "dynamic": False,
        }
        of_bits: dict[int, list[str]] = {layout.bits: [] if layout.layer_bits else [CLASS]}
        for name, bits in layout.layer_bits.items():
            of_bits.setdefault(bits, []).append(name)
        parts = list(of_bits.items())
        if layout.head_bits is not None:
            parts.append((layout.head_bits, [HEAD]))
        groups = [
            {"targets": targets, "format": KIND, "weights": {**weights, "num_bits": bits}} for bits, targets in parts
        ]
        return quantization(KIND, groups, untouched, layout.head_bits is not None, layout.kv_scales)

    def head_bits(self, _layout: Layout) -> tuple[int, ...]:
        """Return the bit widths of an output head that vLLM can load."""
        return 4, 8

    def settings(self, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings of the first config group; other groups may differ only in bits."""
        weights = (groups_of(quantization) or [{}])[0].get("weights")
        if quantization.get("format") != KIND or not isinstance(weights, dict) or weights.get("type") != "int":
            raise ArtifactError(
                f"quantization_config is not {METHOD} with one group of integer codes in the format {KIND}, but "
                f"{shown(quantization.get('format'))}. {AGAIN}"
            )
        size = weights.get("group_size")
        return {
            "bits": weights.get("num_bits"),
            "group_size": -1 if size is None and weights.get("strategy") == "channel" else size,
            "sym": weights.get("symmetric"),
            "desc_act": weights.get("actorder") == "group",  # of older versions
        }

    def layer_bits(self, quantization: Mapping[str, Any]) -> Mapping[str, int]:
        first, *others = groups_of(quantization) or [{}]
        if not others:
            return {}
        if first.get("targets") != [CLASS]:
            return _named_bits(first, [first, *others])
        if [group.get("targets") for group in others] != [[HEAD]]:
            raise ArtifactError(
                f"quantization_config has {1 + len(others)} groups, and the second one is not for the module "
                f"{HEAD}. {AGAIN}"
            )
        return {**_named_bits(first, others), OTHERS: self.settings(quantization)["bits"]}


def _named_bits(first: Group, groups: list[Group]) -> dict[str, int]:
    """Return bits by layer name; raise ArtifactError if groups differ from the first in anything but bits."""
    named: dict[str, int] = {}
    for group in groups:
        own, targets = group.get("weights"), group.get("targets")
        bits = own.get("num_bits") if isinstance(own, dict) else None
        alike = own == {**(first.get("weights") or {}), "num_bits": bits}
        if not alike or type(bits) is not int or bits not in PACKING.bits or not isinstance(targets, list):
            raise ArtifactError(f"quantization_config has groups of layers that differ in more than bits. {AGAIN}")
        for name in targets:
            if not isinstance(name, str) or named.setdefault(name, bits) != bits:
                raise ArtifactError(f"quantization_config: {shown(name)} does not name a layer of {bits} bits. {AGAIN}")
    return named


PACKING = _CompressedPacking()


def refusals(stored: Mapping[str, Any]) -> Mapping[str, str]:
    """Return, by engine, why it cannot load a folder with this single-group `quantization_config`."""
    if not stored:
        return {}
    settings = PACKING.settings(stored)
    reasons, symmetric = {}, settings.get("sym")
    if (bits := settings.get("bits")) == 8 and symmetric:
        reasons = gpus_only("0.23", "mixed_precision/marlin")
    elif bits != 4:
        reasons = gpus_only("0.25" if bits == 8 or symmetric else "0.31", "mixed_precision/humming")
    if not symmetric:
        reasons["transformers"] = f"transformers does not load packed zero points with {METHOD} 0.20; vLLM does"
    return reasons
