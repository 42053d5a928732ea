"""Checkpoints of Apple's mlx-lm: grouped integer codes with a scale and a bias per group.

Per linear layer with weight (N, K) and bits b: `weight` uint32 [N, K*b/32], each row one little-endian bit string of
codes; `scales` and `biases` float16 [N, G]. value = scale * code + bias, as in mx.quantize. A zero point is stored as
the bias -scale * zero. This is exact for symmetric codes, whose zero point is a power of two; other biases are rounded
to float16, with a relative error of at most 2^-11. config.json has the settings as `quantization`.

The modes of small floats have no biases, and uint8 scales [N, G]. mxfp4 is written and read; nvfp4, whose scales lack
the global factor that other formats have, and mxfp8 are only read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.contracts.format import Content, Format, Kind, Layout, Loading, QuantizedReader, Stored, TensorWriter
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError, RecipeError, UnsupportedError, ValuesError
from quantkit.formats import _grouped_codes as grouped
from quantkit.formats._bit_packing import pack_string, unpack_string, words
from quantkit.formats._grouped_codes import GroupedPacking, head_name, refuse_head
from quantkit.formats._packed_layers import (
    AGAIN,
    LayerReader,
    Packing,
    Parts,
    StoredLayer,
    refuse_stacked,
    write_layers,
)
from quantkit.formats._quantization_config import (
    METHOD_KEY,
    MLX,
    Untouched,
    quantization_of,
    recognizes,
    source_quantization,
)
from quantkit.models.config import older_keys
from quantkit.models.skeleton import Skeleton, linears_to_quantize, refuse_shapes
from quantkit.models.source import Source
from quantkit.numerics.quantized_weight import GroupedWeight, ScaledWeight
from quantkit.records.artifact import Artifact
from quantkit.system.untrusted import shown

CODES, SCALES, BIASES = "weight", "scales", "biases"
GROUP_SIZES = (32, 64, 128)
AFFINE, MXFP4 = "affine", "mxfp4"
SMALL_FLOATS = {MXFP4: (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}  # by mode: bits, columns that share a scale
NO_EXPONENT = 255  # E8M0's NaN
# Architectures for which mlx-lm 0.32.2 computes transformers' logits from a quantized folder, tried with tiny models.
ARCHITECTURES = (
    "cohere", "dots1", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gptj", "granite",
    "helium", "hunyuan_v1_dense", "llama", "ministral3", "mistral", "mixtral", "nemotron", "nemotron_h", "olmo2",
    "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
IGNORES_WINDOW = ("gemma2", "mistral")
HEAD_KEY = "quantized_head"  # in our `quantization_config`: the name of the head, or of the embedding it is tied to


class _MlxPacking(GroupedPacking):
    """MLX's packing: each row is one bit string; scales and biases are separate tensors."""

    name = MLX
    bits = (2, 3, 4, 6, 8)
    codes, scales = CODES, SCALES
    marks: tuple[str, ...] = (SCALES, BIASES)
    parts = (CODES, SCALES, BIASES)
    transposed = False
    records_symmetry = False
    for_vllm = False
    names_layers = True
    ties_head = True
    group_bits = 32
    code_type = "uint32"

    def stored(self, rows: int, columns: int, groups: int, kind: Layout) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {
            CODES: ("uint32", (rows, words(columns, kind.bits))),
            SCALES: ("float16", (rows, groups)),
            BIASES: ("float16", (rows, groups)),
        }

    def pack(self, weight: GroupedWeight, layout: Layout, what: str) -> dict[str, torch.Tensor]:
        parts = super().pack(weight, layout, what)
        if not bool(parts[BIASES].isfinite().all()):
            raise ValuesError(f"{what} has biases beyond float16's range. Rescale the checkpoint, or take more bits.")
        return parts

    def pack_codes(self, weight: GroupedWeight, _layout: Layout) -> dict[str, torch.Tensor]:
        codes = pack_string(weight.codes, weight.bits).view(torch.uint32)
        return {CODES: codes, BIASES: biases_of(weight.scales, weight.zeros)}

    def rescaled(self, scales: torch.Tensor, stored: Callable[[str], torch.Tensor], bits: int) -> Parts:
        zeros = self.unpack_zeros({SCALES: stored(SCALES), BIASES: stored(BIASES)}, bits, 0, 0)
        return {**self.pack_scales(scales), BIASES: biases_of(scales.to(torch.float16), zeros)}

    def unpack_codes(self, parts: Parts, bits: int) -> torch.Tensor:
        packed = parts[CODES].view(torch.int32)
        return unpack_string(packed, bits, packed.shape[1] * 32 // bits)

    def unpack_zeros(self, parts: Parts, bits: int, _rows: int, _groups: int) -> torch.Tensor:
        """Return the integer zero points nearest to -bias / scale; `exact` checks that nothing was lost."""
        scales, biases = parts[SCALES].float(), parts[BIASES].float()
        zeros = torch.round(-biases / torch.where(scales == 0, 1, scales))
        return zeros.clamp_(0, (1 << bits) - 1).to(torch.uint8)

    def size(self, layer: StoredLayer, bits: int) -> tuple[int, int, int]:
        (rows, packed), (_, groups) = layer.matrix(CODES), layer.matrix(SCALES)
        return rows, packed * 32 // bits, groups

    def refusal(self, name: str, _rows: int, columns: int, bits: int) -> str | None:
        return f"{name} has {columns} columns; MLX needs a multiple of 32" if columns % 32 else None

    def head_bits(self, _layout: Layout) -> tuple[int, ...]:
        return self.bits

    def quantization(self, layout: Layout, _untouched: Untouched) -> dict[str, Any]:
        every = {"group_size": layout.group_size, "mode": AFFINE}
        named = {name: {**every, "bits": bits} for name, bits in layout.layer_bits.items()}
        return {METHOD_KEY: MLX, "bits": layout.bits, **every, **named}

    def layer_bits(self, quantization: Mapping[str, Any]) -> Mapping[str, int]:
        named = {name: own["bits"] for name, own in _of_layers(quantization).items() if "bits" in own}
        if wrong := [name for name, bits in named.items() if type(bits) is not int or bits not in self.bits]:
            raise ArtifactError(f"quantization gives {wrong[0]} the bits {shown(named[wrong[0]])}. {AGAIN}")
        return {**named, grouped.OTHERS: quantization["bits"]} if named else {}

    def overrides(self, quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return list(_of_layers(quantization).values())

    def layout(self, layers: Sequence[StoredLayer]) -> Layout:
        """Extend `GroupedPacking.layout`; raise an error if biases are not integer multiples of their scales."""
        for layer in layers:
            parts = layer.read((SCALES, BIASES))
            zeros = self.unpack_zeros(parts, self.bits_of(layer), 0, 0)
            if not exact(parts, zeros):
                raise UnsupportedError(
                    f"{layer.folder}: the biases of {layer.name} are no whole multiples of their scales, as zero "
                    "points of other formats are. Quantize the unquantized model, or take the method float."
                )
        return super().layout(layers)

    def value(self, layer: StoredLayer, weight: GroupedWeight) -> Stored:
        """Return codes if all biases correspond to zero points, else dequantized values as MLX computes them."""
        parts = {SCALES: weight.scales, **layer.read((BIASES,))}
        if not bool((parts[SCALES].isfinite() & parts[BIASES].isfinite()).all()):
            raise ArtifactError(
                f"{layer.folder}: the layer {layer.name} has scales or biases that are not finite. {AGAIN}"
            )
        if exact(parts, weight.zeros) and bool((parts[SCALES] != 0).all()):
            return super().value(layer, weight)
        values = weight.codes.float() * weight.spread(parts[SCALES])
        return values.add_(weight.spread(parts[BIASES]))

    def notes(self, layout: Layout) -> tuple[str, ...]:
        if layout.symmetric:
            return ()
        return (
            f"zero points become float16 biases: values change by up to {(1 << layout.bits) / 20.48:.1f} % of a step",
        )


def biases_of(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return biases -scale * zero, float16 (N, G), rounded once."""
    return (scales.double() * -zeros.double()).to(torch.float16)


def exact(parts: Parts, zeros: torch.Tensor) -> bool:
    """Return whether every bias equals -scale * zero without rounding."""
    return bool((parts[SCALES].double() * -zeros.double()).equal(parts[BIASES].double()))


def _of_layers(quantization: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: own for name, own in quantization.items() if isinstance(own, dict)}


class FloatPacking(Packing[ScaledWeight]):
    """The modes of small floats: codes of E2M1 or E4M3 in 32-bit words, scales of E8M0 or (nvfp4) E4M3 in uint8."""

    holds = ScaledWeight
    codes, code_type = CODES, "uint32"
    marks, parts = (SCALES,), (CODES, SCALES)

    def __init__(self, mode: str) -> None:
        self.mode, (bits, self.columns) = mode, SMALL_FLOATS[mode]
        self.bits = (bits,)

    def pack(self, weight: ScaledWeight, _layout: Layout, _what: str) -> dict[str, torch.Tensor]:
        return {CODES: pack_string(weight.values, 4).view(torch.uint32), SCALES: weight.scales}

    def unpack(self, parts: Parts, bits: int) -> ScaledWeight:
        words, scales = parts[CODES].contiguous(), parts[SCALES]
        if bits == 8:
            return ScaledWeight(words.view(torch.float8_e4m3fn), scales, (1, self.columns))
        codes = unpack_string(words.view(torch.int32), 4, words.shape[1] * 8)
        scales = scales if self.mode == MXFP4 else scales.view(torch.float8_e4m3fn)
        return ScaledWeight(codes, scales, (1, self.columns))

    def type_name(self, _bits: int) -> str:
        return self.mode

    def shape(self, layer: StoredLayer) -> tuple[int, int]:
        rows, packed = layer.matrix(CODES)
        return rows, packed * 32 // self.bits[0]

    def called(self, _layers: Iterable[StoredLayer]) -> str:
        return f"{MLX}, {self.mode}"

    def layout(self, layers: Sequence[StoredLayer]) -> Layout | None:
        if self.mode != MXFP4:
            return None
        for layer in layers:
            self.refuse_parts(layer)
        return Layout(4, self.columns, values=MXFP4)

    def refuse_parts(self, layer: StoredLayer) -> None:
        (rows, columns), scales = self.shape(layer), layer.shape(SCALES)
        found = (layer.dtype(CODES), layer.dtype(SCALES), scales)
        if found != ("uint32", "uint8", (rows, columns // self.columns)) or columns % self.columns or 0 in scales:
            raise ArtifactError(
                f"{layer.folder}: {layer.name} ({rows} x {columns}) is stored as {found[0]} with scales of {found[1]} "
                f"{scales}, which do not fit the mode {self.mode}. {AGAIN}"
            )

    def value(self, layer: StoredLayer, weight: ScaledWeight) -> ScaledWeight:
        nan = weight.scales == NO_EXPONENT if weight.scales.dtype == torch.uint8 else weight.factors().isnan()
        if bool(nan.any()) or not bool(weight.steps().isfinite().all()):
            raise ArtifactError(f"{layer.folder}: the layer {layer.name} has values or scales that are NaN. {AGAIN}")
        return weight


PACKING = _MlxPacking()


def _settings(layout: Layout) -> dict[str, Any]:
    return {METHOD_KEY: MLX, "bits": 4, "group_size": layout.group_size, "mode": layout.values}


def _open(folder: Path, files: tuple[str, ...], _config: dict[str, Any], own: bool = True) -> QuantizedReader:
    """Open a folder of quantkit (`own`) or of mlx-lm, whose layers may have different modes."""
    quantization = (quantization_of(folder) if own else source_quantization(folder)[1]) or {}
    packings: list[Packing[Any]] = []
    for mode in _modes(quantization):
        packings.append(PACKING.of_folder(folder, own) if mode == AFFINE else FloatPacking(mode))
    return LayerReader(folder, files, packings)


def _modes(quantization: Mapping[str, Any]) -> list[str]:
    """Return the modes of all layers; raise ArtifactError for an unknown one."""
    modes = [own.get("mode", AFFINE) for own in (quantization, *_of_layers(quantization).values())]
    if unknown := [mode for mode in modes if mode not in (AFFINE, *SMALL_FLOATS)]:
        known = ", ".join((AFFINE, *SMALL_FLOATS))
        raise ArtifactError(f"quantization has the mode {shown(unknown[0])}; quantkit reads {known}. {AGAIN}")
    return list(dict.fromkeys(modes))


def _check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked[Layout]:
    if source.architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"mlx-lm does not load quantized models of the architecture {source.architecture!r} that quantkit writes, "
            f"or computes them wrongly. It takes {', '.join(ARCHITECTURES)}."
        )
    if layout.values == MXFP4:
        return _check_mxfp4(source, skeleton, layout)
    if layout.group_size not in ("auto", *GROUP_SIZES):
        known = ", ".join(map(str, GROUP_SIZES))
        raise RecipeError(f"the format mlx holds groups of {known} columns, not of {layout.group_size}")
    checked = grouped.check(PACKING, source, skeleton, layout)
    if checked.plan.group_size not in GROUP_SIZES:
        raise UnsupportedError(f"no group of {GROUP_SIZES} columns divides all layers of {source.model}, as MLX needs")
    window = source.config.get("sliding_window") if source.architecture in IGNORES_WINDOW else None
    note = f"mlx-lm ignores the sliding window of {window} tokens, so it computes longer texts differently"
    return replace(checked, notes=(*checked.notes, note)) if window else checked


def _check_mxfp4(source: Source, skeleton: Skeleton, layout: Layout) -> Checked[Layout]:
    refuse_shapes(source, skeleton)
    refuse_stacked(source, skeleton)
    refuse_head(f"{MLX} with {MXFP4}", (), source, skeleton, layout)
    shapes = linears_to_quantize(source, skeleton)
    for name, (_, k) in shapes.items():
        if k % 32:
            raise UnsupportedError(f"{name} has {k} columns; {MXFP4} needs a multiple of 32")
    quantized = sum(n * k for n, k in shapes.values())
    return Checked(layout, quantized * 17 // 32 + (source.parameters - quantized) * 2 + 50_000_000)


@contextmanager
def _write(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> Iterator[TensorWriter]:
    with (
        write_layers(FloatPacking(MXFP4), source, skeleton, run, layout, _settings(layout))
        if layout.values == MXFP4
        else grouped.write(PACKING, source, skeleton, run, layout)
    ) as writer:
        yield writer
    path = run.folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    settings = config["quantization_config"]
    if layout.head_bits is not None:
        settings[head_name(skeleton)] = {"group_size": layout.group_size, "bits": layout.head_bits, "mode": AFFINE}
        settings[HEAD_KEY] = head_name(skeleton)
    config |= older_keys(config)
    config["quantization"] = {key: value for key, value in settings.items() if key not in (METHOD_KEY, HEAD_KEY)}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _recorded_options(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    stored = quantization_of(artifact.folder)
    if stored.get("mode") == MXFP4:
        return {"bits": (MXFP4,), "group_size": (32,), "sym": (True,), "desc_act": (False,)}
    head = stored.get(str(stored.get(HEAD_KEY)))
    bits = head.get("bits") if isinstance(head, dict) else None
    return {**grouped.recorded_options(PACKING, artifact), "head_bits": (bits,)}


FORMAT = Format(
    name=MLX,
    summary="grouped integer codes with scales and biases, and MXFP4 values, for Apple's mlx-lm",
    reference="https://github.com/ml-explore/mlx-lm",
    holds=(Content.GROUPED_CODES, Content.MXFP4_VALUES),
    loading={
        "mlx": Loading("0.32", weights="packed"),
        "reference": Loading(weights="packed", packed_bits=("2", "3", "4")),
    },
    recognizes=partial(recognizes, MLX),
    open=_open,
    check=_check,
    writer=_write,
    open_quantized=partial(_open, own=False),
    kinds=(
        *grouped.kinds(PACKING),
        *grouped.mixes(PACKING),
        Kind(MXFP4, "", _settings(Layout(4, 32, values=MXFP4))),
    ),
    recorded_options=_recorded_options,
    usage="\nOn Apple silicon, with `pip install mlx-lm`:\n\n"
    "```bash\nmlx_lm.generate --model FOLDER --prompt Hello\n```\n",
    library="mlx",
    defaults={"sym": False},  # a bias is stored in any case
)
