"""The reference engine: reads every format and computes in torch with transformers' modules, whole or block by block.

GPTQ, RTN and AWQ layers of up to 4 bits run on torch's int4 kernel. Layers with 8-bit weights and 8-bit inputs round
the inputs as vLLM's kernels do. All other layers are dequantized to bfloat16 (or `dtype`).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import nn

from quantkit.calibration.passes import WindowWalk
from quantkit.checkpoints.rows import Rows, rows_in_memory
from quantkit.contracts.engine import KERNEL_VARIABLES, Engine, LoadedModel, LoadSpec, WeightStats, Window, refuse_dtype
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_format
from quantkit.contracts.stored import kv_scales_of, open_stored
from quantkit.engines._torch_model import Int4Linear, ScaledLinear, TorchModel, kernel_group, round_keys_and_values
from quantkit.errors import ArtifactError, EngineError, pip_line
from quantkit.models.output_head import OutputHead, StoredOutput
from quantkit.models.skeleton import (
    Skeleton,
    leftovers,
    load,
    open_skeleton,
    rows_of,
    set_parameter,
    source_name,
    tables,
    weight_name,
)
from quantkit.models.source import Source
from quantkit.models.unfuse import cut
from quantkit.numerics.matmul import products_everywhere
from quantkit.numerics.quantized_weight import GroupedWeight, ScaledWeight
from quantkit.records.artifact import Artifact
from quantkit.system.device import find_device
from quantkit.system.memory import trim_heap
from quantkit.system.untrusted import reraise_as

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
INT4_BITS = ("2", "3", "4")  # codes for torch's int4 kernel, which computes in bfloat16
NARROW = (torch.float16, torch.bfloat16)
PIECE = 1 << 23  # values of the output layer read at a time
Value: TypeAlias = torch.Tensor | GroupedWeight | ScaledWeight


class _Values(ABC):
    """Reader of a model's parameters by their names in the skeleton, which also puts them into modules."""

    def __init__(self, skeleton: Skeleton, folder: Path, device: str) -> None:
        self.skeleton, self._folder, self._device = skeleton, folder, device
        self._linears = skeleton.linears()
        self._rounded: set[str] = set()

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all parameters that have values, in reading order."""

    @abstractmethod
    def read(self, parameter: str) -> Value:
        """Return a parameter's value in its module's shape."""

    @abstractmethod
    def stored(self, parameter: str) -> Value | Rows:
        """Return a parameter outside the blocks as it is stored, or as lazy Rows."""

    @abstractmethod
    def rows(self, parameter: str, rows: list[int]) -> torch.Tensor:
        """Return the given rows of a parameter outside the blocks."""

    def tensor(self, parameter: str) -> torch.Tensor:
        return _dense(self.read(parameter))

    def place(self, module: nn.Module, prefix: str, name: str, dtype: torch.dtype) -> None:
        """Load parameter `prefix` + `name` into `module` as `name`: codes if a kernel computes them, else dense."""
        value = self.read(prefix + name)
        if (shape := tuple(module.get_parameter(name).shape)) != tuple(value.shape):
            raise ArtifactError(
                f"{self._folder}: {prefix + name} has the shape {tuple(value.shape)}, not {shape}; convert again"
            )
        path = name.removesuffix(".weight")
        bias = getattr(module.get_submodule(path), "bias", None) if path != name else None
        # The bias may still be empty; it is set later.
        on_kernel = prefix + name in self._linears and (self._device, dtype) == ("cpu", torch.bfloat16)
        if on_kernel and isinstance(value, GroupedWeight) and kernel_group(value):
            module.set_submodule(path, Int4Linear(value, bias, dtype))
        elif isinstance(value, ScaledWeight) and value.inputs is not None:
            module.set_submodule(path, ScaledLinear(value.to(self._device), bias, dtype))
            self._rounded.add(f"inputs of quantized layers are rounded as vLLM does: {value.inputs.words}")
        else:
            set_parameter(module, name, _dense(value).to(self._device, dtype))

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on the values loaded so far."""
        return tuple(sorted(self._rounded))


class _SourceValues(_Values):
    def __init__(self, source: Source, skeleton: Skeleton, device: str) -> None:
        super().__init__(skeleton, source.folder, device)
        leftovers(source, skeleton)  # refuses more blocks than config.json counts
        self._source = source

    def names(self) -> list[str]:
        return sorted(self.skeleton.parameter_names())

    def read(self, parameter: str) -> Value:
        return load(self._source, self.skeleton, parameter)

    def stored(self, parameter: str) -> Value | Rows:
        info = self._source.info(source_name(self._source, self.skeleton, parameter))
        narrow = info.dtype in ("F16", "BF16")
        return self.read(parameter) if narrow else rows_of(self._source, self.skeleton, parameter)

    def rows(self, parameter: str, rows: list[int]) -> torch.Tensor:
        name = source_name(self._source, self.skeleton, parameter)
        return torch.cat([self._source.rows(name, row, row + 1) for row in rows])


class _ArtifactValues(_Values):
    """Reader of an artifact's parameters, by the reader of its format."""

    def __init__(self, artifact: Artifact, kind: str, skeleton: Skeleton, device: str) -> None:
        super().__init__(skeleton, artifact.folder, device)
        self._reader = open_stored(artifact, find_format(kind))
        named = list(skeleton.model.named_parameters(remove_duplicate=False))
        own = {id(value): name for name, value in reversed(named)}  # the first of tied ones
        prefix = f"{skeleton.model.base_model_prefix}."
        self._own_name = {name: own[id(value)] for name, value in named}
        parameters, stacks = set(skeleton.parameter_names()), _stacks(skeleton)
        self._stored: dict[str, str] = {}
        self._cut: set[str] = set()  # parameters that are part of a stack of experts
        for stored in self._reader.names():
            every = (stored, prefix + stored, stored.removeprefix(prefix))
            known = next((name for name in every if name in parameters or name in stacks), None)
            if known in stacks:
                self._stored |= dict.fromkeys(stacks[known], stored)
                self._cut |= set(stacks[known])
            elif known is not None:
                self._stored[known] = stored

    def names(self) -> list[str]:
        return list(self._stored)

    def read(self, parameter: str) -> Value:
        value = self.stored(parameter)
        if parameter in self._cut and isinstance(value, torch.Tensor | Rows):
            rows = value if isinstance(value, Rows) else rows_in_memory(value)
            return cut(
                self.skeleton.origins[parameter], lambda _name, start, stop: torch.from_numpy(rows.read(start, stop))
            )
        if isinstance(value, Rows):
            value = torch.from_numpy(value.whole())
        # Codes have the linear layer's shape; a dense tensor has the source's.
        origin = self.skeleton.origins.get(parameter)
        if isinstance(value, torch.Tensor) and origin is not None and origin.transposed and origin.expert is None:
            value = value.T.contiguous()
        return value

    def stored(self, parameter: str) -> Value | Rows:
        return self._reader.read(self._stored[self._own_name[parameter]])

    def rows(self, parameter: str, rows: list[int]) -> torch.Tensor:
        value = self.stored(parameter)
        if isinstance(value, Rows):
            return torch.from_numpy(np.concatenate([value.read(row, row + 1) for row in rows]))
        return _dense(value)[rows]


def _stacks(skeleton: Skeleton) -> dict[str, list[str]]:
    """Return the parameters that are slices of each stack of experts, by the stack's names."""
    stacks: dict[str, list[str]] = {}
    for parameter, origin in skeleton.origins.items():
        for name in {origin.name, origin.also} - {""} if origin.expert is not None else ():
            stacks.setdefault(name, []).append(parameter)
    return stacks


def _dense(value: Value) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value.dense()


class WalkedModel(TorchModel):
    """A model that is computed block by block, with one decoder block's weights in memory.

    Values, modules and batches are the same as for the whole model, so the figures are equal. The output layer is in
    memory as stored. The model cannot generate tokens: each token would read all blocks from disk.
    """

    def __init__(self, values: _Values, dtype: str, spec: LoadSpec) -> None:
        # The first block's notes on linear layers apply to all blocks.
        self._skeleton, self._values, self._spec = values.skeleton, values, spec
        prefix = self._skeleton.block_prefix(0)
        for name in self._skeleton.linears_of(0):
            block = copy.deepcopy(self._skeleton.blocks[0])
            values.place(block, prefix, name.removeprefix(prefix), DTYPES[dtype])
        super().__init__(self._skeleton.model, dtype, values.notes)

    def hidden(self, windows: Sequence[Window]) -> Iterator[tuple[list[Window], torch.Tensor]]:
        """Yield (windows of a batch, final hidden states (B, T, D)) in order; the states enter the output layer."""
        spec, device = self._spec, torch.device(self._spec.device)
        walk = WindowWalk(
            self._skeleton, self._values, self._block, device, DTYPES[self.dtype], spec.offload_bytes, spec.progress
        )
        last = OutputHead(self._behind(), self._skeleton.blocks_path)
        for batch, outputs in walk.outputs(windows):
            with torch.inference_mode(), products_everywhere():
                hidden = last.last_states(outputs)
            yield batch, hidden

    def head(self) -> OutputHead:
        """Load and return the output layer, in the narrowest dtype that preserves its values."""
        dtype, device = DTYPES[self.dtype], self._spec.device
        model = self._behind()
        layer = model.get_output_embeddings()
        weight = _narrow(self._values.stored(weight_name(model, layer)), dtype).to(device)
        bias = None
        if layer.bias is not None:
            bias = self._values.tensor(weight_name(model, layer, "bias")).to(device, dtype)
        model.set_output_embeddings(StoredOutput(weight, bias))
        trim_heap()
        return OutputHead(model)

    def stream(self, ids: list[int], count: int) -> Iterator[int]:
        """Raise EngineError: a model that is computed block by block cannot generate."""
        raise EngineError("a model that is computed block by block cannot generate tokens. Leave --walk out.")

    @contextmanager
    def _block(self, index: int) -> Iterator[nn.Module]:
        prefix = self._skeleton.block_prefix(index)
        module: nn.Module = copy.deepcopy(self._skeleton.blocks[index])
        for name, _ in list(module.named_parameters()):
            self._values.place(module, prefix, name, DTYPES[self.dtype])
        yield module.to(self._spec.device)  # its buffers

    def _behind(self) -> PreTrainedModel:
        """Return the model with the weights outside its blocks, embeddings and output layer."""
        model = copy.deepcopy(self._skeleton.model)
        ends = model.get_input_embeddings(), model.get_output_embeddings(), *tables(model).values()
        without = {id(value) for layer in ends for value in layer.parameters()}
        inside = f"{self._skeleton.blocks_path}."
        for name, parameter in list(model.named_parameters()):
            if not name.startswith(inside) and id(parameter) not in without:
                self._values.place(model, "", name, DTYPES[self.dtype])
        for module in model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                setattr(module, key, buffer.to(self._spec.device))
        return model


def _narrow(stored: Value | Rows, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in the narrowest dtype that gives the same values in `dtype`."""
    if isinstance(stored, GroupedWeight | ScaledWeight):
        return stored.dense().to(dtype)
    if isinstance(stored, Rows):
        weight = torch.empty(stored.shape, dtype=dtype)
        for start, values in stored.pieces(PIECE):
            weight[start : start + len(values)] = torch.from_numpy(values)
        return weight
    return stored if stored.dtype in NARROW and dtype == torch.float32 else stored.to(dtype)


def _load(model: Model, spec: LoadSpec) -> LoadedModel:
    with reraise_as(f"the reference engine cannot load {model.folder}", EngineError, "Run `quantkit verify` on it."):
        torch.set_num_threads(spec.threads)
        skeleton = open_skeleton(model.config)
        if spec.kv_cache is not None:
            round_keys_and_values(skeleton.model, kv_scales_of(model) or {})
        values: _Values
        if model.artifact is not None:
            values = _ArtifactValues(model.artifact, model.format, skeleton, spec.device)
        elif model.source is not None:
            values = _SourceValues(model.source, skeleton, spec.device)
        else:
            raise EngineError("a model must be an artifact or a source")
        if missing := set(skeleton.parameter_names()) - set(values.names()):
            raise ArtifactError(f"{model.folder} has no values for {min(missing)}; convert again")
        dtype = spec.dtype or "bfloat16"
        if spec.walk:
            return WalkedModel(values, dtype, spec)
        module = skeleton.model
        for parameter in values.names():
            values.place(module, "", parameter, DTYPES[dtype])
        module.tie_weights()
        module.to(spec.device)  # its buffers
        return TorchModel(module, dtype, values.notes)


def _holds(stats: WeightStats, dtype: str | None) -> int:
    """Return the bytes of the weights; packed layers need one byte per weight for codes and 0.25 for scales."""
    item = DTYPES[dtype or "bfloat16"].itemsize
    inside = stats.parameters - stats.outside
    packed = find_format(stats.format).loaded_by(ENGINE.name).stays_packed(stats.bits)
    each = 1.25 if packed and (item == 2 or stats.bits not in INT4_BITS) else item
    return int(inside * each) + stats.outside * item


ENGINE = Engine(
    name="reference",
    module="torch",
    install=f"Install it with: {pip_line()}",
    opens="it opens every format",
    load=_load,
    find_device=find_device,
    refuse=lambda dtype: refuse_dtype("reference", dtype, DTYPES),
    process="forked",
    variables=("ATEN_", *KERNEL_VARIABLES),
    sets_threads=True,
    kv_caches=("fp8",),
    in_torch=True,
    walks=True,
    holds=_holds,
)
