"""4-bit NormalFloat checkpoints as transformers stores them for bitsandbytes.

Per linear layer with weight (N, K): `weight` uint8 [N*K/2, 1] and, beside it, `weight.absmax`, `weight.quant_map`, with
double quantization `weight.nested_absmax` and `weight.nested_quant_map`, and `weight.quant_state.bitsandbytes__nf4`
(numerics/normal_float.py has their shapes). All else is dense. Loaded by transformers with bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.checkpoints.writer import open_writer
from quantkit.contracts.format import Format, Layout, TensorWriter, Written
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats._quantization_config import recognizes
from quantkit.models.skeleton import Skeleton, linears_to_quantize, load, open_skeleton, refuse_shapes
from quantkit.models.source import Source
from quantkit.models.unfuse import expert_of
from quantkit.numerics.normal_float import STATE, NormalFloatWeight

PARTS = ("absmax", "nested_absmax", "nested_quant_map", "quant_map", STATE)
USAGE = """
transformers, with `pip install bitsandbytes`:

{transformers}
"""


def _check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked:
    refuse_shapes(source, skeleton)
    linears = linears_to_quantize(source, skeleton)
    if any(expert_of(name) for name in linears):
        raise UnsupportedError(
            f"transformers keeps the experts of {source.architecture!r} stacked, and bitsandbytes leaves those "
            "unquantized"
        )
    quantized = sum(n * k for n, k in linears.values())
    return Checked(int(quantized * 4.6 / 8 + (source.parameters - quantized) * 2 + 50_000_000), plan=layout)


class _Reader:
    def __init__(self, folder: Path, files: tuple[str, ...], config: dict[str, Any]) -> None:
        self._folder, self._stored, self._config = folder, StoredTensors(folder, files), config
        self._all = set(self._stored.names())
        self._skeleton: Skeleton | None = None

    def names(self) -> list[str]:
        """The tensors' names in the source."""
        parts = tuple(f".weight.{part}" for part in PARTS)
        return [name for name in self._stored.names() if not name.endswith(parts)]

    def read(self, name: str) -> torch.Tensor:
        """One of them, dense, as the source has it."""
        if f"{name}.{STATE}" not in self._all:
            return self._stored.read(name)
        parts = {part: self._stored.read(f"{name}.{part}") for part in PARTS if f"{name}.{part}" in self._all}
        try:
            value = NormalFloatWeight(self._stored.read(name), parts).dense()
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
            raise ArtifactError(f"{self._folder}: {name} cannot be read: {error}. Convert again.") from None
        self._skeleton = self._skeleton or open_skeleton(self._config)
        origin = self._skeleton.origins.get(name)
        return value.T if origin is not None and origin.transposed else value


class _Writer(TensorWriter):
    dtype = "bfloat16"

    def add(self, name: str, value: Written) -> None:
        """Take a layer's codes, or a dense tensor, which is stored in the layout's dtype."""
        if isinstance(value, NormalFloatWeight):
            self.checkpoint.add(name, value.packed)
            for part, tensor in value.parts.items():
                self.checkpoint.add(f"{name}.{part}", tensor)
            self.run.findings.count("nf4")
        elif isinstance(value, torch.Tensor):
            self.checkpoint.add(name, value.to(getattr(torch, self.dtype)))
            self.run.findings.count(self.dtype)
        else:
            super().add(name, value)


def _quantization(layout: Layout) -> dict[str, Any]:
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": layout.dtype,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": (layout.settings or {}).get("double_quant", True),
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }


@contextmanager
def _write(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> Iterator[_Writer]:
    with open_writer(run.folder, source.config, layout.dtype, _quantization(layout)) as checkpoint:
        writer = _Writer(checkpoint, source, run)
        writer.dtype = layout.dtype
        yield writer
        there = checkpoint.names()
        for name in skeleton.parameter_names():
            if name not in there:
                writer.add(name, load(source, skeleton, name))


FORMAT = Format(
    name="bitsandbytes",
    summary="4-bit NormalFloat as transformers stores it for bitsandbytes",
    reference="https://huggingface.co/docs/bitsandbytes",
    holds=("normal float",),
    engines=("transformers", "reference"),
    recognizes=partial(recognizes, "bitsandbytes"),
    open=_Reader,
    check=_check,
    writer=_write,
    refusals=lambda _artifact: {"vllm": "vLLM computes bitsandbytes formats on NVIDIA cards only"},
    usage=USAGE,
)
