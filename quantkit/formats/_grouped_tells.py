"""What a checkpoint of grouped codes says of the recipe that its manifest tells: bits, groups, symmetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.artifact import Artifact
from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.formats._grouped_layout import OTHERS, Packing
from quantkit.formats._head import MODULE
from quantkit.formats._quantization_config import dtype_of, quantization_of, refuse_other_dtypes


def tells(packing: Packing, artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    """What config.json says of the recipe."""
    quantization = quantization_of(artifact.folder)
    stored, types = packing.settings(quantization), artifact.manifest.tensor_types
    dense = [name for name in types if not name.startswith("int")]
    refuse_other_dtypes(artifact.folder, dtype_of(artifact.folder), dense)
    every = _bits_by_layer(packing, artifact, quantization)
    # A recipe may have asked for the bits of any of them, or for a choice.
    bits = {str(bits) for bits in every.values()} or {str(stored.get("bits"))}
    said: dict[str, tuple[object, ...]] = {"bits": (*sorted(bits), "auto")}
    named = artifact.manifest.options.get("layer_bits")
    if isinstance(named, dict) and named.keys() <= every.keys():  # others are patterns
        said["layer_bits"] = ({name: every[name] for name in named},)
    return said | {name: (stored[name],) for name in ("group_size", "sym", "desc_act") if name in stored}


def _bits_by_layer(packing: Packing, artifact: Artifact, quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The bits of the layers in the blocks by name, as config.json says them."""
    ending, bits = f".{packing.codes}", packing.layer_bits(quantization)
    names = StoredTensors(artifact.folder, artifact.manifest.weight_files).names()
    layers = [name.removesuffix(ending) for name in names if name.endswith(ending) and name != MODULE + ending]
    base = bits.get(OTHERS, packing.settings(quantization).get("bits"))
    return {layer: bits.get(layer, base) for layer in layers}
