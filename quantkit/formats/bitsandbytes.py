"""4-bit NormalFloat (NF4) in the layout that transformers stores for bitsandbytes.

Per linear layer with weight (N, K): `weight` uint8 [N*K/2, 1], `weight.absmax`, `weight.quant_map`, with double
quantization `weight.nested_absmax` and `weight.nested_quant_map`, and `weight.quant_state.bitsandbytes__nf4`
(shapes: numerics/normal_float.py). All other tensors are dense.

Two more kinds can be read as sources: FP4 (another table of values), and LLM.int8: `weight` int8 [N, K], `SCB` float32
[N] (the largest magnitude of each row) and `weight_format` uint8, which must be 0 (row-major; 1 to 3 are tensor-core
layouts). value = code * SCB / 127 (int8_vectorwise_dequant; Dettmers et al., arXiv:2208.07339, section 2.1).

transformers decides which layers become bitsandbytes layers (transformers/integrations/bitsandbytes.py): `nn.Linear`
and GPT-2's Conv1D, but no subclasses such as FalconLinear, stacked experts, output heads, or float32 modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.format import Content, Format, Kind, Layout, Loading, TensorWriter
from quantkit.contracts.run import Checked, Run
from quantkit.contracts.stored import NamedReader, open_stored
from quantkit.errors import ArtifactError, EngineError, UnsupportedError
from quantkit.formats._packed_layers import LayerReader, Packing, Parts, RowsReader, StoredLayer, write_layers
from quantkit.formats._quantization_config import quantization_of, recognizes, refuse_other_dtypes, untouched
from quantkit.models.skeleton import Skeleton, linears_to_quantize, open_skeleton, refuse_shapes
from quantkit.models.source import Source
from quantkit.models.unfuse import renamed
from quantkit.numerics.normal_float import STATES, NormalFloatWeight
from quantkit.records.artifact import Artifact
from quantkit.system.untrusted import reraise_as, shown, silenced

CALLED = {"nf4": "4-bit NormalFloat", "fp4": "4-bit floats (FP4)"}
SCALES, ORDER = "SCB", "weight_format"
STEP = np.float32(1 / 127)
AGAIN = "Fetch the checkpoint again."
USAGE = """
transformers, with `pip install bitsandbytes`:

{transformers}
"""
# On a CPU with AVX-512 bfloat16, codes are rearranged before the first product, or an assertion fails.
ROW_UNIT = 32
RUN = 64  # columns per scale; rows with a partial run give wrong values or a shape error
ONLY_ON_GPUS = (
    f"bitsandbytes computes it on GPUs only: CPUs need columns in multiples of {RUN}, and CPUs with "
    f"AVX-512 bfloat16 also rows in multiples of {ROW_UNIT}"
)


@dataclass(frozen=True)
class Replaced:
    """Which weights transformers replaces with bitsandbytes layers, under the skeleton's names."""

    quantized: tuple[str, ...]
    dense: tuple[str, ...]
    dense_as: str  # how the first dense one is stored
    # Modules that it would replace but that are not quantized; a file that names any also names the skipped ones.
    skipped: tuple[str, ...]


def replaced_layers(config: dict[str, Any], linears: Collection[str], settings: Any = None) -> Replaced:
    """Return which of `linears` transformers would replace with bitsandbytes layers; raise UnsupportedError if none."""
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    model = open_skeleton(config, native=True, settings=settings).model
    kind = str(config.get("model_type"))
    classes = {renamed(kind, f"{name}.weight"): type(module).__name__ for name, module in model.named_modules()}
    quantizer = Bnb4BitHfQuantizer(BitsAndBytesConfig(load_in_4bit=True), pre_quantized=True)
    usual = quantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    with silenced():
        quantizer.preprocess_model(model, device_map=None)
    names = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Linear4bit)]
    found = {renamed(kind, name): name for name in names}
    quantized = tuple(name for name in linears if name in found)
    dense = tuple(name for name in linears if name not in found)
    dense_as = f"in a {classes[dense[0]]}" if dense and dense[0] in classes else "stacked"
    if not quantized:
        raise UnsupportedError(
            f"transformers makes no layer of {shown(config.get('model_type'))} a bitsandbytes layer (not {dense[0]}, "
            f"which it keeps {dense_as}), so nothing would be quantized"
        )
    others = sorted(found[name].removesuffix(".weight") for name in found.keys() - set(linears))
    return Replaced(quantized, dense, dense_as, (*sorted(usual), *others) if others else ())


def computed_by_processors(rows: int, columns: int, units: bool = True) -> bool:
    """Return whether bitsandbytes can run a layer of this shape on a CPU; `units`: the CPU has AVX-512 bfloat16."""
    return columns % RUN == 0 and (rows % ROW_UNIT == 0 or not units)


def has_bfloat16_units() -> bool:
    """Return whether bitsandbytes detects AVX-512 bfloat16 on this CPU."""
    from bitsandbytes.functional import has_avx512bf16

    return bool(has_avx512bf16())


def _check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked[Layout]:
    refuse_shapes(source, skeleton)
    linears = linears_to_quantize(source, skeleton)
    replaced = replaced_layers(source.config, linears, source.settings)
    shapes = {name: linears[name] for name in replaced.quantized}
    quantized = sum(n * k for n, k in shapes.values())
    notes = []
    if replaced.dense:
        share, rest = quantized / sum(n * k for n, k in linears.values()), source.parameters - quantized
        scales = 8 / RUN + 32 / (RUN * 256) if (layout.settings or {}).get("double_quant", True) else 32 / RUN
        bits = (quantized * (4 + scales) + rest * (32 if layout.dtype == "float32" else 16)) / source.parameters
        left = (
            f"bitsandbytes quantizes only {len(shapes)} of {len(linears)} linear layers of {source.architecture!r} "
            f"(not {replaced.dense[0]}, which transformers keeps {replaced.dense_as}), {share:.1%} of their weights: "
            f"the file has {bits:.2f} bits per weight"
        )
        if share < layout.min_quantized:
            raise UnsupportedError(f"{left}. Give --min-quantized {math.floor(share * 100) / 100:g} to accept that")
        notes.append(f"{left}, and the other layers are {layout.dtype}")
    if misfits := [name for name, shape in shapes.items() if not computed_by_processors(*shape)]:
        rows, columns = shapes[misfits[0]]
        notes.append(
            f"{len(misfits)} of {len(shapes)} quantized layers, such as {misfits[0]} ({rows} x {columns} weights): "
            f"{ONLY_ON_GPUS}. Evaluate it with --engine reference"
        )
    return Checked(
        replace(layout, dense=replaced.dense, skipped=replaced.skipped),
        int(quantized * 4.6 / 8 + (source.parameters - quantized) * 2 + 50_000_000),
        notes=tuple(notes),
    )


class _NormalFloatPacking(Packing[NormalFloatWeight]):
    """Packing of 4-bit codes of the table `kind` (nf4 or fp4); `config` is the config.json of a folder to read."""

    holds = NormalFloatWeight
    codes, code_type = "weight", "uint8"
    bits = (4,)
    keeps_stacks = True

    def __init__(self, kind: str, dtype: torch.dtype = torch.bfloat16, config: dict[str, Any] | None = None) -> None:
        self._kind, self.dtype, self._config = kind, dtype, config or {}
        self._state = f"weight.{STATES[kind]}"
        scales = ("absmax", "nested_absmax", "nested_quant_map", "quant_map", *STATES.values())
        self.marks, self.parts = (self._state, "weight"), ("weight", *(f"weight.{part}" for part in scales))

    @cached_property
    def _skeleton(self) -> Skeleton:
        return open_skeleton(self._config)

    def pack(self, weight: NormalFloatWeight, _layout: Layout, _what: str) -> dict[str, torch.Tensor]:
        return {"weight": weight.packed} | {f"weight.{part}": tensor for part, tensor in weight.parts.items()}

    def unpack(self, parts: Parts, _bits: int) -> NormalFloatWeight:
        others = {part.removeprefix("weight."): tensor for part, tensor in parts.items() if part != "weight"}
        packed = parts["weight"]
        if packed.shape[1:] == (1,):  # other tools store codes as any number type (`bnb_4bit_quant_storage`)
            packed = packed.view(torch.uint8).reshape(-1, 1)
        return NormalFloatWeight(packed, others)

    def type_name(self, _bits: int) -> str:
        return self._kind

    def called(self, _layers: Iterable[StoredLayer]) -> str:
        return f"bitsandbytes, {CALLED[self._kind]}"

    def shape(self, layer: StoredLayer) -> tuple[int, int]:
        unread = torch.empty(layer.shape("weight"), dtype=getattr(torch, layer.dtype("weight")), device="meta")
        with reraise_as(f"{layer.folder}: {layer.name} cannot be read", ArtifactError, "Convert again."):
            return self.unpack({"weight": unread} | layer.read([self._state]), 4).shape

    def value(self, layer: StoredLayer, weight: NormalFloatWeight) -> torch.Tensor:
        with reraise_as(f"{layer.folder}: {layer.name} cannot be read", ArtifactError, "Convert again."):
            value = weight.dense()
        origin = self._skeleton.origins.get(layer.name)
        return value.T if origin is not None and origin.transposed and origin.expert is None else value


def _open(folder: Path, files: tuple[str, ...], config: dict[str, Any], kind: str = "nf4") -> LayerReader:
    others = tuple(f".weight.{state}" for other, state in STATES.items() if other != kind)
    if name := next((name for name in StoredTensors(folder, files).names() if name.endswith(others)), None):
        raise ArtifactError(f"{folder} has {name}, but config.json says that codes are {kind}. Convert again.")
    return LayerReader(folder, files, [_NormalFloatPacking(kind, config=config)])


class _Int8Reader(RowsReader):
    called = "bitsandbytes, LLM.int8"

    def __init__(self, folder: Path, files: tuple[str, ...]) -> None:
        super().__init__(folder, files)
        codes = [name for name in self.known if name.endswith(".weight") and self.stored.dtype(name) == "int8"]
        self.shapes = {name: self._shape_of(name) for name in sorted(codes)}
        self.scale_names = {name for name in self.known if name.rpartition(".")[2] in (SCALES, ORDER)}
        for name in sorted(self.scale_names):
            if (weight := f"{name.rpartition('.')[0]}.weight") not in self.shapes:
                raise ArtifactError(f"{folder} has {name} without codes of int8 in {weight}. {AGAIN}")

    def _shape_of(self, name: str) -> tuple[int, ...]:
        scale, order = (name.removesuffix("weight") + part for part in (SCALES, ORDER))
        if scale not in self.known:
            raise ArtifactError(f"{self.folder} lacks the tensor {scale}, the scales of {name}. {AGAIN}")
        shape, found, dtype = self.stored.shape(name), self.stored.shape(scale), self.stored.dtype(scale)
        if len(shape) != 2 or 0 in shape or found != shape[:1] or dtype != "float32":
            raise ArtifactError(
                f"{self.folder}: {name} has the shape {shape}, and {scale} is {dtype} of the shape {found} instead of "
                f"float32 with one value per row. {AGAIN}"
            )
        if order in self.known and not (
            self.stored.shape(order) in ((), (1,))
            and self.stored.dtype(order) == "uint8"
            and int(self.stored.read(order)) == 0
        ):
            raise ArtifactError(
                f"{self.folder}: {order} is not 0: the codes of {name} are in a layout for one kind of GPU. Load and "
                "save it with bitsandbytes 0.45 or newer."
            )
        return shape

    def dequantizer(self, name: str) -> Callable[[int, int], NDArray[np.float32]]:
        scale = name.removesuffix("weight") + SCALES
        scales: NDArray[np.float32] = self.stored.read(scale).numpy()
        if not np.isfinite(scales).all():
            raise ArtifactError(f"{self.folder}: the scales {scale} are not finite. {AGAIN}")

        def dequantized(start: int, stop: int) -> NDArray[np.float32]:
            codes = self.stored.read_rows(name, start, stop).view(np.int8).reshape(stop - start, -1)
            with np.errstate(over="ignore"):
                return codes.astype(np.float32) * scales[start:stop, None] * STEP

        return dequantized


def _open_quantized(folder: Path, files: tuple[str, ...], config: dict[str, Any]) -> LayerReader | _Int8Reader:
    stored = quantization_of(folder)
    in_4_bits, in_8_bits, kind = (stored.get(key) for key in ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type"))
    if in_8_bits is True and in_4_bits is not True:
        return _Int8Reader(folder, files)
    if in_4_bits is True and in_8_bits is not True and isinstance(kind, str) and kind in STATES:
        return _open(folder, files, config, kind)
    raise ArtifactError(
        f"{folder / 'config.json'}: bitsandbytes settings must be load_in_8bit, or load_in_4bit with type nf4 "
        f"or fp4, not {shown(in_8_bits)}, {shown(in_4_bits)} and {shown(kind)}."
    )


def _write(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> AbstractContextManager[TensorWriter]:
    from transformers import BitsAndBytesConfig

    packing = _NormalFloatPacking("nf4", getattr(torch, layout.dtype))
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        llm_int8_skip_modules=list(_skipped(source, skeleton, layout)) or None,
        bnb_4bit_compute_dtype=layout.dtype,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=(layout.settings or {}).get("double_quant", True),
    ).to_dict()
    return write_layers(packing, source, skeleton, run, layout, quantization)


def _skipped(source: Source, skeleton: Skeleton, layout: Layout) -> tuple[str, ...]:
    """Return the modules for `llm_int8_skip_modules`, which transformers must not replace."""
    if not source.passthrough and source.text_prefixes is None:
        return layout.skipped
    whole, prefixes = untouched(source, skeleton), source.text_prefixes
    names = [(name,) if prefixes is None else prefixes.modules(name) for name in layout.skipped]
    return (*dict.fromkeys((*whole.linears, *whole.modules, *chain(*names))),)


def _refuse_misfits(artifact: Artifact, _dtype: str | None, device: str) -> None:
    """Raise EngineError if bitsandbytes cannot run one of the artifact's layers on this CPU."""
    if device != "cpu":
        return
    reader, units = open_stored(artifact, FORMAT), has_bfloat16_units()
    assert isinstance(reader, LayerReader | NamedReader)
    for name in reader.names():
        shape = reader.quantized_shape(name)
        if shape is not None and not computed_by_processors(shape[0], shape[1], units):
            raise EngineError(
                f"{artifact.folder}: {name} has {shape[0]} x {shape[1]} weights, and {ONLY_ON_GPUS}. Evaluate with "
                "--engine reference."
            )


def _refuse_in_vllm(artifact: Artifact, dtype: str | None, device: str) -> None:
    """Raise EngineError for shapes that the CPU lacks, and for experts, which stay floats in these files."""
    _refuse_misfits(artifact, dtype, device)
    if expert := next((name for name in open_stored(artifact, FORMAT).names() if ".experts." in name), None):
        raise EngineError(
            f"{artifact.folder}: vllm-bnb-plugin would round {expert} to NF4, which this artifact does not quantize. "
            "Evaluate with --engine reference."
        )


def _recorded_options(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    stored = quantization_of(artifact.folder)
    dense = [name for name in artifact.manifest.tensor_types if name != "nf4"]
    dtype = refuse_other_dtypes(artifact.folder, [*dense, str(stored.get("bnb_4bit_compute_dtype"))])
    if stored.get("bnb_4bit_quant_type") != "nf4" or stored.get("load_in_4bit") is not True:
        raise ArtifactError(f"{artifact.folder / 'config.json'} does not set 4-bit NormalFloat. Convert again.")
    double = stored.get("bnb_4bit_use_double_quant")
    return {"bits": ("4",), "compute_dtype": (dtype,), "double_quant": (double,)}


FORMAT = Format(
    name="bitsandbytes",
    summary="4-bit NormalFloat as transformers stores it for bitsandbytes",
    reference="https://huggingface.co/docs/bitsandbytes",
    holds=(Content.NORMAL_FLOAT,),
    loading={
        "transformers": Loading("5.23", "bitsandbytes", "packed", refuse=_refuse_misfits),
        "reference": Loading(),
        "vllm": Loading("0.32", refuse=_refuse_in_vllm, plugins=("vllm-bnb-plugin>=0.0.3", "bitsandbytes>=0.49")),
    },
    recognizes=partial(recognizes, "bitsandbytes"),
    open=_open,
    check=_check,
    writer=_write,
    open_quantized=_open_quantized,
    kinds=(Kind("4", "NF4"), Kind("4", "NF4, double quantization")),
    servers={"sglang": "", "tgi": "--quantize bitsandbytes-nf4"},
    recorded_options=_recorded_options,
    usage=USAGE,
)
