"""4-bit NormalFloat checkpoints as transformers stores them for bitsandbytes.

Per linear layer with weight (N, K): `weight` uint8 [N*K/2, 1] and, beside it, `weight.absmax`, `weight.quant_map`, with
double quantization `weight.nested_absmax` and `weight.nested_quant_map`, and `weight.quant_state.bitsandbytes__nf4`
(numerics/normal_float.py has their shapes). All else is dense. Loaded by transformers with bitsandbytes.
As sources also bitsandbytes' FP4, which differs in the table of values, and LLM.int8 (llm_int8.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from quantkit.artifact import Artifact
from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.checkpoints.writer import open_writer
from quantkit.contracts.format import Format, Kind, Layout, TensorWriter, Written
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats._grouped import add_others
from quantkit.formats._quantization_config import (
    dtype_of,
    quantization_of,
    recognizes,
    refuse_other_dtypes,
    untouched,
)
from quantkit.formats.bitsandbytes.layers import FOR_CARDS, bits_per_weight, computed_by_processors, replaced_layers
from quantkit.formats.bitsandbytes.llm_int8 import Int8Reader
from quantkit.models.skeleton import Skeleton, linears_to_quantize, open_skeleton, refuse_shapes
from quantkit.models.source import Source
from quantkit.numerics.normal_float import STATES, NormalFloatWeight
from quantkit.untrusted import shown, told

PARTS = ("absmax", "nested_absmax", "nested_quant_map", "quant_map", *STATES.values())
CALLED = {"nf4": "4-bit NormalFloat", "fp4": "4-bit floats (FP4)"}
USAGE = """
transformers, with `pip install bitsandbytes`:

{transformers}
"""


def _check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked:
    refuse_shapes(source, skeleton)
    linears = linears_to_quantize(source, skeleton)
    replaced = replaced_layers(source.config, linears, source.settings)
    shapes = {name: linears[name] for name in replaced.quantized}
    quantized = sum(n * k for n, k in shapes.values())
    notes = []
    if replaced.dense:
        share = quantized / sum(n * k for n, k in linears.values())
        left = (
            f"transformers gives bitsandbytes {len(shapes)} of {len(linears)} linear layers of {source.architecture!r} "
            f"(not {replaced.dense[0]}, which it keeps {replaced.kept_in}), {share:.1%} of their weights: the file has "
            f"{bits_per_weight(source, quantized, layout):.2f} bits per weight"
        )
        if share < layout.min_quantized:
            raise UnsupportedError(f"{left}. Take --min-quantized {math.floor(share * 100) / 100:g} to have it so")
        notes.append(f"{left}, and what is left has {layout.dtype}")
    if misfits := [name for name, shape in shapes.items() if not computed_by_processors(*shape)]:
        rows, columns = shapes[misfits[0]]
        notes.append(
            f"{len(misfits)} of {len(shapes)} quantized layers, such as {misfits[0]} ({rows} x {columns} weights): "
            f"{FOR_CARDS}. Judge there with --engine reference"
        )
    return Checked(
        int(quantized * 4.6 / 8 + (source.parameters - quantized) * 2 + 50_000_000),
        notes=tuple(notes),
        plan=replace(layout, dense=replaced.dense, skipped=replaced.skipped),
    )


class NormalFloatReader:
    """The tensors of a folder with codes of 4 bits; all are of the same table, `kind`."""

    def __init__(self, folder: Path, files: tuple[str, ...], config: dict[str, Any], kind: str = "nf4") -> None:
        self._folder, self._stored, self._config, self._kind = folder, StoredTensors(folder, files), config, kind
        self._all = set(self._stored.names())
        self._skeleton: Skeleton | None = None
        for name in sorted(self._all - set(self.names())):
            if f"{name[: name.index('.weight.')]}.weight" not in self._all:
                raise ArtifactError(f"{folder} has {name} without its codes. Convert again.")
            if name.endswith(tuple(state for other, state in STATES.items() if other != kind)):
                raise ArtifactError(f"{folder} has {name}, and config.json says that codes are {kind}. Convert again.")

    def names(self) -> list[str]:
        """The tensors' names in the source."""
        parts = tuple(f".weight.{part}" for part in PARTS)
        return [name for name in self._stored.names() if not name.endswith(parts)]

    def read(self, name: str) -> torch.Tensor:
        """One of them, dense, as the source has it."""
        if not self._is_quantized(name):
            return self._stored.read(name)
        with told(f"{self._folder}: {name} cannot be read", ArtifactError, "Convert again."):
            value = self._codes(name).dense()
        self._skeleton = self._skeleton or open_skeleton(self._config)
        origin = self._skeleton.origins.get(name)
        return value.T if origin is not None and origin.transposed and origin.expert is None else value

    def _codes(self, name: str) -> NormalFloatWeight:
        parts = {part: self._stored.read(f"{name}.{part}") for part in PARTS if f"{name}.{part}" in self._all}
        return NormalFloatWeight(_as_bytes(self._stored.read(name)), parts)

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape (N, K) of a quantized layer's values; None for a dense tensor."""
        if not self._is_quantized(name):
            return None
        dtype = getattr(torch, self._stored.dtype(name))
        unread = _as_bytes(torch.empty(self._stored.shape(name), dtype=dtype, device="meta"))
        with told(f"{self._folder}: {name} cannot be read", ArtifactError, "Convert again."):
            state = STATES[self._kind]
            return NormalFloatWeight(unread, {state: self._stored.read(f"{name}.{state}")}).shape

    def _is_quantized(self, name: str) -> bool:
        return f"{name}.{STATES[self._kind]}" in self._all

    def quantization(self) -> str:
        """What it is called."""
        return f"bitsandbytes, {CALLED[self._kind]}"

    def layout(self) -> Layout:
        """There is none in another format."""
        raise UnsupportedError(f"{self._folder} has no grouped codes but those of {self.quantization()}")

    def types(self) -> Mapping[str, int]:
        """Layers of codes, and dense tensors by their type."""
        return Counter(self._kind if self._is_quantized(name) else self._stored.dtype(name) for name in self.names())


def _as_bytes(packed: torch.Tensor) -> torch.Tensor:
    """The codes as uint8 [bytes, 1], which other tools store as numbers of any type (`bnb_4bit_quant_storage`)."""
    return packed.view(torch.uint8).reshape(-1, 1) if packed.shape[1:] == (1,) else packed


def _open_quantized(folder: Path, files: tuple[str, ...], config: dict[str, Any]) -> NormalFloatReader | Int8Reader:
    """Of what bitsandbytes has; raises ArtifactError where config.json does not say which."""
    stored = quantization_of(folder)
    in_4_bits, in_8_bits, kind = (stored.get(key) for key in ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type"))
    if in_8_bits is True and in_4_bits is not True:
        return Int8Reader(folder, files, config)
    if in_4_bits is True and in_8_bits is not True and isinstance(kind, str) and kind in STATES:
        return NormalFloatReader(folder, files, config, kind)
    raise ArtifactError(
        f"{folder / 'config.json'}: of bitsandbytes load_in_8bit is read, or load_in_4bit with bnb_4bit_quant_type nf4 "
        f"or fp4; this is {shown(in_8_bits)}, {shown(in_4_bits)} and {shown(kind)}."
    )


class _Writer(TensorWriter):
    def add(self, name: str, value: Written) -> None:
        """Take a layer's codes; at the end everything else comes from the source."""
        if isinstance(value, NormalFloatWeight):
            self.checkpoint.add(name, value.packed)
            for part, tensor in value.parts.items():
                self.checkpoint.add(f"{name}.{part}", tensor)
            self.run.findings.count("nf4")
        else:
            super().add(name, value)


def _skipped(source: Source, skeleton: Skeleton, layout: Layout) -> tuple[str, ...]:
    """What transformers shall not replace; none where it finds that by itself."""
    if not source.passthrough and source.text_prefixes is None:
        return layout.skipped
    whole, prefixes = untouched(source, skeleton), source.text_prefixes
    names = [(name,) if prefixes is None else prefixes.modules(name) for name in layout.skipped]
    return (*dict.fromkeys((*whole.linears, *whole.modules, *chain(*names))),)


def _quantization(layout: Layout, skipped: tuple[str, ...]) -> dict[str, Any]:
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": layout.dtype,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": (layout.settings or {}).get("double_quant", True),
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(skipped) or None,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }


def _tells(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    stored, dtype = quantization_of(artifact.folder), dtype_of(artifact.folder)
    dense = [name for name in artifact.manifest.tensor_types if name != "nf4"]
    refuse_other_dtypes(artifact.folder, dtype, [*dense, str(stored.get("bnb_4bit_compute_dtype"))])
    if stored.get("bnb_4bit_quant_type") != "nf4" or stored.get("load_in_4bit") is not True:
        raise ArtifactError(f"{artifact.folder / 'config.json'} does not ask for 4-bit NormalFloat. Convert again.")
    double = stored.get("bnb_4bit_use_double_quant")
    return {"bits": ("4",), "compute_dtype": (dtype,), "double_quant": (double,)}


@contextmanager
def _write(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> Iterator[_Writer]:
    settings = _quantization(layout, _skipped(source, skeleton, layout))
    with open_writer(run.folder, source, layout.dtype, settings) as checkpoint:
        writer = _Writer(checkpoint, source, run)
        yield writer
        add_others(writer, skeleton, checkpoint.names(), getattr(torch, layout.dtype), keep_stacks=True)


FORMAT = Format(
    name="bitsandbytes",
    summary="4-bit NormalFloat as transformers stores it for bitsandbytes",
    reference="https://huggingface.co/docs/bitsandbytes",
    holds=("normal float",),
    engines=("transformers", "reference"),
    recognizes=partial(recognizes, "bitsandbytes"),
    open=NormalFloatReader,
    check=_check,
    writer=_write,
    open_quantized=_open_quantized,
    kinds=(Kind("4", "NF4"), Kind("4", "NF4, double quantization")),
    refusals=lambda _quantization: {"vllm": "vLLM computes bitsandbytes formats on NVIDIA cards only"},
    since={"reference": "", "transformers": "5.23"},
    servers={"sglang": "", "tgi": "--quantize bitsandbytes-nf4"},
    tells=_tells,
    usage=USAGE,
)
