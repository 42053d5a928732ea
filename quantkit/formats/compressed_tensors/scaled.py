"""Layers of 8-bit integers, 8-bit floats and 4-bit floats, with scales of rows, blocks or groups.

Per linear layer with weight (N, K):

- `int-quantized`: `weight` int8 [N, K], `weight_scale` [N, 1]
- `float-quantized`: `weight` float8_e4m3fn [N, K], `weight_scale` [N, 1], or [ceil(N/128), ceil(K/128)] of blocks
- `nvfp4-pack-quantized`: `weight_packed` uint8 [N, K/2], two codes a byte, the first one low; `weight_scale`
  float8_e4m3fn [N, K/16]; `weight_global_scale` float32 [1], by which scales are divided
- `mxfp4-pack-quantized`: `weight_packed` likewise; `weight_scale` uint8 [N, K/32], exponents of E8M0

Everything else is bfloat16, as the scales of 8-bit values are. Format: schemes.py names it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantkit.artifact import Artifact
from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.checkpoints.writer import open_writer
from quantkit.contracts.format import Layout, TensorWriter, Written
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats._grouped import SCALE_TYPES, add_others, refuse_stacked
from quantkit.formats._grouped_layout import AGAIN, matrix
from quantkit.formats._head import refuse_head
from quantkit.formats._quantization_config import dtype_of, quantization_of, refuse_other_dtypes, untouched
from quantkit.formats.compressed_tensors.schemes import (
    FLOAT4,
    METHOD,
    Scheme,
    quantization,
    scheme_for,
    scheme_of,
    unfound_layer,
)
from quantkit.models.skeleton import Skeleton, linears_to_quantize, refuse_shapes
from quantkit.models.source import Source
from quantkit.numerics.casting import cast_finite
from quantkit.numerics.scaled_weight import ScaledWeight

DTYPE = torch.bfloat16  # of scales of 8-bit values, and of everything that is not quantized
SCALE, DIVISOR, PACKED = "weight_scale", "weight_global_scale", "weight_packed"
# What other tools store beside a layer, and what is not needed for its values.
BESIDE = ("input_scale", "input_zero_point", "input_global_scale", "weight_zero_point", "weight_shape")
VALUE_TYPES = {"int8": "int8", "float8": "float8_e4m3fn"}
SCALE_OF_FLOAT4 = {"nvfp4": "float8_e4m3fn", "mxfp4": "uint8"}
KERNEL_STEP = 16  # rows and columns of 8-bit layers that vLLM multiplies on a card
NO_EXPONENT = 255  # E8M0's NaN


def check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked:
    """Refuse models and shapes that the layout cannot hold, and count the bytes."""
    refuse_shapes(source, skeleton)
    if reason := unfound_layer(source, skeleton):
        raise UnsupportedError(reason)
    refuse_stacked(source, skeleton)
    refuse_head(f"compressed-tensors with {layout.values}", (), source, skeleton, layout)
    scheme = scheme_for(layout)
    linears = linears_to_quantize(source, skeleton)
    rows, columns = scheme.block
    for name, (_, k) in linears.items():
        if columns and k % columns:
            how = " Take granularity channel." if layout.values == "float8" else ""
            raise UnsupportedError(
                f"{name} has {k} input columns, no multiple of {columns}, which share a scale in {scheme.format}.{how}"
            )
    quantized = sum(n * k for n, k in linears.values())
    bits = 8 if layout.values in VALUE_TYPES else 4.5
    nbytes = int(quantized * bits / 8 + 2 * sum(n for n, _ in linears.values()))
    nbytes += (source.parameters - quantized) * 2 + 50_000_000
    return Checked(nbytes, notes=_notes(linears, rows), plan=replace(layout, dtype="bfloat16"))


def _notes(linears: Mapping[str, tuple[int, int]], rows: int) -> tuple[str, ...]:
    for name, (n, k) in linears.items():
        if n % KERNEL_STEP or k % KERNEL_STEP:
            return (f"vLLM on a card would refuse this artifact: {name} is {n} x {k}, no multiples of {KERNEL_STEP}",)
        if rows > 1 and n % rows:
            return (f"vLLM would refuse to compute {name} and its neighbours as one: {n} rows are no blocks of {rows}",)
    return ()


class ScaledReader:
    """The tensors of such a checkpoint: quantized layers under their weight's name, the rest as stored.

    `own`: quantkit wrote it, and engines round inputs; other tools have scales of other floats and parts beside them.
    `quantization` and `others` as of GroupedReader.
    """

    def __init__(
        self, folder: Path, files: tuple[str, ...], _config: dict[str, Any], own: bool = True,
        quantization: Mapping[str, Any] | None = None, others: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._folder, self._stored, self._own = folder, StoredTensors(folder, files), own
        self._scheme = scheme_of(quantization_of(folder) if quantization is None else quantization, own)
        self._all = set(self._stored.names()) - set(others)
        self._codes = PACKED if self._scheme.values in FLOAT4 else "weight"
        parts = (SCALE, DIVISOR, *(() if own else BESIDE))
        stems = [name.removesuffix(SCALE) for name in self._all if name.endswith(f".{SCALE}")]
        self._parts = {
            stem + part for stem in stems if self._has(stem, self._codes) for part in parts if self._has(stem, part)
        }
        for name in sorted(self._all - self._parts):
            stem, _, leaf = name.rpartition(".")
            if leaf in (SCALE, DIVISOR):
                raise ArtifactError(f"{folder} has {name} without its {self._codes}. {AGAIN}")
            narrow = leaf == PACKED or self._stored.dtype(name) in VALUE_TYPES.values()
            if narrow and f"{stem}.{SCALE}" not in self._all:
                raise ArtifactError(f"{folder} lacks the tensor {stem}.{SCALE}. {AGAIN}")

    def names(self) -> list[str]:
        """The tensors' names in the source."""
        return source_names(self._all - self._parts)

    def read(self, name: str) -> torch.Tensor | ScaledWeight:
        """One of them; raises ArtifactError for parts that do not belong together."""
        stem = name.removesuffix("weight")
        if not self._is_quantized(name):
            return self._stored.read(name)
        self._refuse_parts(stem)
        present = {
            part: self._stored.read(stem + part) for part in (self._codes, SCALE, DIVISOR) if self._has(stem, part)
        }
        weight = unpack(self._scheme, present, self._own)
        self._refuse_values(name, weight)
        return weight

    def types(self) -> Mapping[str, int]:
        """Layers by what their values are, and dense tensors by their type."""
        return Counter(self.type_of(name) for name in self.names())

    def type_of(self, name: str) -> str:
        """What the values of a layer are, or the type of a dense tensor."""
        return self._scheme.values if self._is_quantized(name) else self._stored.dtype(name)

    @property
    def kind(self) -> Scheme:
        """What values are, and which of them share a scale."""
        return self._scheme

    def fits(self, name: str) -> object:
        """What a layer's values depend on: type and block; None where its parts are not as config.json says."""
        try:
            self._refuse_parts(name.removesuffix("weight"))
        except ArtifactError:
            return None
        shape = self.quantized_shape(name)
        assert shape is not None
        rows, columns = shape
        high, wide = self._scheme.block_of(rows, columns)
        return self._scheme.values, min(high, rows), min(wide, columns)

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape (N, K) of a quantized layer's values; None for a dense tensor."""
        if not self._is_quantized(name):
            return None
        rows, columns = matrix(self._stored, name.removesuffix("weight") + self._codes)
        return rows, columns * (2 if self._codes == PACKED else 1)

    def quantization(self) -> str:
        """The format, and what shares a scale."""
        return f"{METHOD}, {self._scheme.words}"

    def layout(self) -> Layout:
        """That of MXFP4, which has one; raises UnsupportedError for others, ArtifactError for damaged parts."""
        if self._scheme.values == "mxfp4":
            for name in self.names():
                if self._is_quantized(name):
                    self._refuse_parts(name.removesuffix("weight"))
            return Layout(4, self._scheme.block[1], values="mxfp4")
        raise UnsupportedError(f"{self._folder} has no grouped codes, but is {self.quantization()}")

    def _has(self, stem: str, part: str) -> bool:
        return stem + part in self._all

    def _is_quantized(self, name: str) -> bool:
        stem = name.removesuffix("weight")
        return name.endswith("weight") and self._has(stem, self._codes) and self._has(stem, SCALE)

    def _refuse_parts(self, stem: str) -> None:
        """Hold the types and shapes of a layer's parts against each other and against config.json."""
        values = self._scheme.values
        shape = self.quantized_shape(stem + "weight")
        assert shape is not None
        rows, columns = shape
        high, wide = self._scheme.block_of(rows, columns)
        grid = (-(-rows // max(high, 1)), -(-columns // max(wide, 1)))
        kinds: dict[str, set[str]] = {self._codes: {VALUE_TYPES.get(values, "uint8")}}
        kinds[SCALE] = {SCALE_OF_FLOAT4[values]} if values in FLOAT4 else {"bfloat16"} if self._own else SCALE_TYPES
        if values == "nvfp4":
            kinds[DIVISOR] = {"float32"}
        for part, known in kinds.items():
            if (dtype := self._stored.dtype(stem + part)) not in known:
                raise ArtifactError(
                    f"{self._folder}: {stem + part} is {dtype}, not {' or '.join(sorted(known))}. {AGAIN}"
                )
        scales = self._stored.shape(stem + SCALE)
        flat = len(scales) < 2 and 1 in grid  # (N,) for (N, 1); the package spreads (1, N) over columns
        loose = not self._own and (flat or grid == (1, 1)) and math.prod(scales) == math.prod(grid)
        divisor = self._stored.shape(stem + DIVISOR) if DIVISOR in kinds else (1,)
        if (
            0 in (rows, columns)
            or (values in FLOAT4 and columns % wide)
            or math.prod(divisor) != 1
            or not (scales == grid or loose)
        ):
            raise ArtifactError(
                f"{self._folder}: the parts of {stem}weight have the shapes {(rows, columns)}, {scales} and {divisor}, "
                f"which do not fit {self._scheme.words}. {AGAIN}"
            )

    def _refuse_values(self, name: str, weight: ScaledWeight) -> None:
        """Hold values and scales against what engines may take for granted."""
        factors, wrong = weight.factors(), None
        if weight.scales.dtype == torch.uint8 and bool((weight.scales == NO_EXPONENT).any()):
            wrong = "has scales that are no numbers"
        elif not bool(factors.isfinite().all()) or (self._own and not bool((factors > 0).all())):
            wrong = "has scales that are not finite" + (", or not above 0" if self._own else "")
        elif weight.values.dtype == torch.float8_e4m3fn and not bool(weight.steps().isfinite().all()):
            wrong = "has values that are no numbers"
        zeros = name.removesuffix("weight") + "weight_zero_point"
        if wrong is None and zeros in self._parts and bool((self._stored.read(zeros).to(torch.float32) != 0).any()):
            wrong = "has zero points, and config.json says that it is symmetric"
        if wrong is not None:
            raise ArtifactError(f"{self._folder}: the layer {name} {wrong}. {AGAIN}")


def source_names(stored: set[str]) -> list[str]:
    """The source's names of what is stored, but for scales, in order."""
    return sorted(name.removesuffix(PACKED) + "weight" if name.endswith(f".{PACKED}") else name for name in stored)


def pack(weight: ScaledWeight) -> dict[str, torch.Tensor]:
    """The parts of a layer."""
    if weight.values.dtype != torch.uint8:
        return {"weight": weight.values, SCALE: weight.scales}
    parts = {PACKED: weight.values[:, ::2] | (weight.values[:, 1::2] << 4), SCALE: weight.scales}
    return parts if weight.divisor is None else parts | {DIVISOR: weight.divisor}


def unpack(scheme: Scheme, parts: Mapping[str, torch.Tensor], own: bool) -> ScaledWeight:
    """The layer of its parts; the inverse."""
    values = parts.get("weight")
    if values is None:
        packed = parts[PACKED]
        values = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    rows, columns = values.shape
    high, wide = scheme.block_of(rows, columns)
    scales = parts[SCALE].reshape(-(-rows // high), -(-columns // wide))
    divisor = parts[DIVISOR].reshape(1) if DIVISOR in parts else None
    return ScaledWeight(values, scales, (high, wide), divisor, scheme.inputs if own else None)


class ScaledWriter(TensorWriter):
    """Takes scaled layers and dense tensors of the blocks; at the end everything else comes from the source."""

    scheme: Scheme

    def add(self, name: str, value: Written) -> None:
        """Add a layer's parts, or a dense tensor in bfloat16."""
        if isinstance(value, torch.Tensor):
            self.checkpoint.add(name, cast_finite(value, DTYPE, f"{name} of {self.source.model}"))
            self.run.findings.count("bfloat16")
        elif isinstance(value, ScaledWeight):
            for part, tensor in pack(value).items():
                self.checkpoint.add(name.removesuffix("weight") + part, tensor)
            self.run.findings.count(self.scheme.values)
        else:
            super().add(name, value)

    def block(self, prefix: str) -> dict[str, torch.Tensor | ScaledWeight]:
        """What was added of the block whose names begin with `prefix`."""
        stored = {name for name in self.checkpoint.names() if name.startswith(prefix)}
        return {name: _taken(self.scheme, stored, self.checkpoint.get, name) for name in _without_scales(stored)}


def _without_scales(stored: set[str]) -> list[str]:
    return source_names({name for name in stored if not name.endswith((f".{SCALE}", f".{DIVISOR}"))})


def _taken(
    scheme: Scheme, stored: set[str], get: Callable[[str], torch.Tensor], name: str
) -> torch.Tensor | ScaledWeight:
    stem = name.removesuffix("weight")
    if stem + SCALE not in stored:
        return get(name)
    return unpack(
        scheme, {part: get(stem + part) for part in ("weight", PACKED, SCALE, DIVISOR) if stem + part in stored}, True
    )


@contextmanager
def write(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> Iterator[ScaledWriter]:
    """Yield a writer; on success write the whole checkpoint."""
    scheme = scheme_for(layout)
    settings = quantization(scheme, untouched(source, skeleton))
    with open_writer(run.folder, source, "bfloat16", settings) as checkpoint:
        writer = ScaledWriter(checkpoint, source, run)
        writer.scheme = scheme
        yield writer
        add_others(writer, skeleton, set(_without_scales(set(checkpoint.names()))), DTYPE)


def refusals(stored: Mapping[str, Any]) -> Mapping[str, str]:
    """Why engines cannot take a folder of this `quantization_config`."""
    if scheme_of(stored, own=False).values in FLOAT4:
        return {"vllm": "vLLM computes 4-bit floats on cards only"}
    return {}


def tells(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    """What config.json says of the recipe."""
    scheme, types = scheme_of(quantization_of(artifact.folder), own=True), artifact.manifest.tensor_types
    refuse_other_dtypes(artifact.folder, dtype_of(artifact.folder), [name for name in types if name != scheme.values])
    if scheme.values in FLOAT4:
        return {"bits": (scheme.values,), "group_size": (scheme.block[1],), "sym": (True,), "desc_act": (False,)}
    return {"bits": ("8",), "granularity": ("block" if scheme.block[1] else "channel",)}
