"""compressed-tensors' `kv_cache_scheme`: an FP8 key-value cache with a scale per attention layer.

`k_scale` and `v_scale`, [1], next to the projections of an attention layer; a cached value is its E4M3 code times the
scale. vLLM takes 1 for missing scales. Not supported: integers, scales per head or channel, dynamic scales.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.format import KvScales, QuantizedReader
from quantkit.contracts.stored import NamedReader
from quantkit.errors import ArtifactError
from quantkit.formats._packed_layers import SCALE_TYPES, LayerReader
from quantkit.formats._quantization_config import quantization_of
from quantkit.system.untrusted import shown

KEY = "kv_cache_scheme"
AGAIN = "Fetch or convert it again."
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "group_size": None, "dynamic": False}
SCALE = re.compile(r"\.(\d+)\.\D*\b([kv])_scale$")


def without_scales(reader: LayerReader) -> QuantizedReader:
    """Return a reader of all tensors but the cache's scales, which are no parameters of the model."""
    scales = [name for name in reader.names() if SCALE.search(name)]
    return NamedReader(reader, None, scales, Counter(map(reader.type_of, scales))) if scales else reader


def kv_scales(folder: Path, files: tuple[str, ...]) -> KvScales | None:
    """Return the scales in a folder; None if its config.json asks for no quantized cache. Raises ArtifactError."""
    if (scheme := quantization_of(folder).get(KEY)) is None:
        return None
    if not isinstance(scheme, dict) or any(scheme.get(key) != value for key, value in SCHEME.items()):
        raise ArtifactError(f"{folder}: quantkit does not compute the {KEY} {shown(scheme)}, only FP8 per tensor")
    stored, found = StoredTensors(folder, files), dict[int, dict[str, float]]()
    for name in stored.names():
        if (place := SCALE.search(name)) is None:
            continue
        if stored.shape(name) not in ((), (1,)) or stored.dtype(name) not in SCALE_TYPES:
            raise ArtifactError(
                f"{folder}: {name} is {stored.dtype(name)} {stored.shape(name)}, not one float. {AGAIN}"
            )
        value = float(stored.read(name))
        if not 0 < value < float("inf") or found.setdefault(int(place[1]), {}).setdefault(place[2], value) != value:
            raise ArtifactError(f"{folder}: {name} is {value}, or a second scale of its layer. {AGAIN}")
    if alone := [layer for layer, scales in found.items() if len(scales) != 2]:
        raise ArtifactError(f"{folder} has one of k_scale and v_scale of layer {alone[0]}, not both. {AGAIN}")
    return {layer: (scales["k"], scales["v"]) for layer, scales in found.items()}
