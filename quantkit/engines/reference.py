"""Reference: our own reader of the artifact's bytes, computed by plain torch through transformers' module code.

GPTQ, RTN and AWQ layers of up to 4 bits decode on torch's int4 kernel; layers of 8-bit values with inputs of 8 bits
round these as vLLM's kernels do; all else is dense in bfloat16 (or `dtype`).
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from quantkit.artifact import Artifact
from quantkit.calibration.passes import SourceValues
from quantkit.checkpoints.rows import Rows, rows_in_memory
from quantkit.contracts.engine import KERNEL_VARIABLES, Engine, Holding, LoadedModel, LoadSpec, refuse_dtype
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_format
from quantkit.contracts.stored import open_stored
from quantkit.engines._int4_linear import Int4Linear, kernel_takes
from quantkit.engines._scaled_linear import ScaledLinear
from quantkit.engines._torch_model import TorchModel
from quantkit.engines._walked_model import WalkedModel
from quantkit.errors import ArtifactError, EngineError
from quantkit.models.architectures.origins import cut
from quantkit.models.leftovers import leftovers
from quantkit.models.skeleton import Skeleton, load, open_skeleton, rows_of, set_parameter, source_name
from quantkit.models.source import Source
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.numerics.scaled_weight import ScaledWeight
from quantkit.system.device import find_device
from quantkit.untrusted import told

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
CODES = ("gptq", "awq", "compressed-tensors")  # formats whose layers torch's int4 kernel takes
Value: TypeAlias = torch.Tensor | GroupedWeight | ScaledWeight


class _SourceParts:
    """A source's values."""

    def __init__(self, source: Source, skeleton: Skeleton) -> None:
        self._source, self._skeleton = source, skeleton
        self._values = SourceValues(source, skeleton)

    def names(self) -> list[str]:
        """The parameters that it has values for."""
        return sorted(self._skeleton.parameter_names())

    def read(self, parameter: str) -> Value:
        """The value of a parameter in the shape that its module takes."""
        return load(self._source, self._skeleton, parameter)

    def stored(self, parameter: str) -> torch.Tensor | Rows:
        """A dense one, in rows where it is not stored as floats."""
        info = self._source.info(source_name(self._source, self._skeleton, parameter))
        narrow = info.dtype in ("F16", "BF16")
        return self.tensor(parameter) if narrow else rows_of(self._source, self._skeleton, parameter)

    def tensor(self, parameter: str) -> torch.Tensor:
        """A dense one that lies outside the blocks."""
        return load(self._source, self._skeleton, parameter)

    def rows(self, parameter: str, rows: list[int]) -> torch.Tensor:
        """Some of its rows."""
        return self._values.rows(parameter, rows)


class _ArtifactParts:
    """An artifact's values, through its format's reader."""

    def __init__(self, artifact: Artifact, kind: str, skeleton: Skeleton) -> None:
        self._reader, self._skeleton = open_stored(artifact, find_format(kind)), skeleton
        named = list(skeleton.model.named_parameters(remove_duplicate=False))
        own = {id(value): name for name, value in reversed(named)}  # of tied ones the first
        prefix = f"{skeleton.model.base_model_prefix}."
        self._own_name = {name: own[id(value)] for name, value in named}
        parameters = set(skeleton.parameter_names())
        self._stored: dict[str, str] = {}
        stacks = _stacks(skeleton)
        self._cut: set[str] = set()  # parameters that lie in a stack of experts
        for stored in self._reader.names():
            every = (stored, prefix + stored, stored.removeprefix(prefix))
            known = next((name for name in every if name in parameters or name in stacks), None)
            if known in stacks:
                self._stored |= dict.fromkeys(stacks[known], stored)
                self._cut |= set(stacks[known])
            elif known is not None:
                self._stored[known] = stored

    def names(self) -> list[str]:
        """The parameters that it has values for, in the order of the file."""
        return list(self._stored)

    def read(self, parameter: str) -> Value:
        """The value of a parameter in the shape that its module takes."""
        value = self.stored(parameter)
        if parameter in self._cut and isinstance(value, torch.Tensor | Rows):
            rows = value if isinstance(value, Rows) else rows_in_memory(value)
            return cut(self._skeleton.origins[parameter], partial(_rows, rows))
        if isinstance(value, Rows):
            value = torch.from_numpy(value.whole())
        # Codes are those of a linear layer; a dense tensor is as the source stores it.
        origin = self._skeleton.origins.get(parameter)
        if isinstance(value, torch.Tensor) and origin is not None and origin.transposed and origin.expert is None:
            value = value.T.contiguous()
        return value

    def stored(self, parameter: str) -> Any:
        """What the reader gives."""
        return self._reader.read(self._stored[self._own_name[parameter]])

    def tensor(self, parameter: str) -> torch.Tensor:
        """A dense one that lies outside the blocks."""
        return _dense(self.read(parameter))

    def rows(self, parameter: str, rows: list[int]) -> torch.Tensor:
        """Some of its rows."""
        value = self.stored(parameter)
        if isinstance(value, Rows):
            return torch.from_numpy(np.concatenate([value.read(row, row + 1) for row in rows]))
        return _dense(value)[rows]


def _stacks(skeleton: Skeleton) -> dict[str, list[str]]:
    """By each name of a stack of experts, the parameters that are cut out of it."""
    stacks: dict[str, list[str]] = {}
    for parameter, origin in skeleton.origins.items():
        for name in {origin.name, origin.also} - {""} if origin.expert is not None else ():
            stacks.setdefault(name, []).append(parameter)
    return stacks


def _rows(rows: Rows, _name: str, start: int, stop: int) -> torch.Tensor:
    return torch.from_numpy(rows.read(start, stop))


def _load(model: Model, spec: LoadSpec) -> LoadedModel:
    with told(f"our own reader cannot load {model.folder}", EngineError, "Run `quantkit verify` on it."):
        torch.set_num_threads(spec.threads)
        placed = _Placed(model, spec.device)
        name = spec.dtype or "bfloat16"
        if spec.walk:
            placed.first_block(DTYPES[name])
            return WalkedModel(placed.skeleton, placed, name, spec, placed.notes())
        module = placed.skeleton.model
        for parameter in placed.parts.names():
            placed.place(module, "", parameter, DTYPES[name])
        module.tie_weights()
        module.to(spec.device)  # its buffers
        return TorchModel(module, name, placed.notes())


class _Placed:
    """The values of a model, which are put into modules of its skeleton: kernels for codes, dense ones for the rest."""

    def __init__(self, model: Model, device: str) -> None:
        self.skeleton, self._folder, self._device = open_skeleton(model.config), model.folder, device
        self._rounded: set[str] = set()
        self._linears = self.skeleton.linears()
        self.parts: _SourceParts | _ArtifactParts
        if model.artifact is not None:
            self.parts = _ArtifactParts(model.artifact, model.format, self.skeleton)
        elif model.source is not None:
            leftovers(model.source, self.skeleton)  # refuses blocks beyond those of config.json
            self.parts = _SourceParts(model.source, self.skeleton)
        else:
            raise EngineError("a model that is neither an artifact nor a source cannot be computed")
        if missing := set(self.skeleton.parameter_names()) - set(self.parts.names()):
            raise ArtifactError(f"{model.folder} gives no values for {min(missing)}; convert again")
        self.stored, self.tensor, self.rows = self.parts.stored, self.parts.tensor, self.parts.rows

    def place(self, module: Any, prefix: str, name: str, dtype: torch.dtype) -> None:
        """Put the parameter `prefix` + `name` into `module`, where it is called `name`."""
        value = self.parts.read(prefix + name)
        if (shape := tuple(module.get_parameter(name).shape)) != tuple(value.shape):
            raise ArtifactError(
                f"{self._folder}: {prefix + name} has the shape {tuple(value.shape)}, not {shape}; convert again"
            )
        path = name.removesuffix(".weight")
        bias = getattr(module.get_submodule(path), "bias", None) if path != name else None
        # A bias may be empty for now; it is set like every other parameter when it comes.
        on_kernel = prefix + name in self._linears and (self._device, dtype) == ("cpu", torch.bfloat16)
        if on_kernel and isinstance(value, GroupedWeight) and kernel_takes(value):
            module.set_submodule(path, Int4Linear(value, bias, dtype))
        elif isinstance(value, ScaledWeight) and value.inputs is not None:
            module.set_submodule(path, ScaledLinear(value.to(self._device), bias, dtype))
            self._rounded.add(f"inputs of quantized layers are rounded as vLLM does: {value.inputs.words}")
        else:
            set_parameter(module, name, _dense(value).to(self._device, dtype))

    def first_block(self, dtype: torch.dtype) -> None:
        """Put each linear layer of the first block into place for once: what is told of it holds for all blocks."""
        prefix = self.skeleton.block_prefix(0)
        for name in self.skeleton.linears_of(0):
            self.place(copy.deepcopy(self.skeleton.blocks[0]), prefix, name.removeprefix(prefix), dtype)

    def notes(self) -> tuple[str, ...]:
        """What its user should know of it."""
        return tuple(sorted(self._rounded))


def _dense(value: Value) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value.dense()


def _holds(holding: Holding, dtype: str | None) -> int:
    """Codes take a byte a weight, where their layers are not dense, and scales some more."""
    item = DTYPES[dtype or "bfloat16"].itemsize
    inside = holding.parameters - holding.outside
    kernel = holding.format in CODES and holding.bits in ("2", "3", "4") and item == 2
    each = 1.25 if kernel or (holding.format == "compressed-tensors" and holding.bits == "8") else item
    return int(inside * each) + holding.outside * item


ENGINE = Engine(
    name="reference",
    summary="our reader of the artifact's bytes, computed in torch",
    module="torch",
    install="Install it with: pip install quantkit",
    opens="it opens every format",
    load=_load,
    find_device=find_device,
    refuse=lambda dtype: refuse_dtype("reference", dtype, DTYPES),
    process="forked",
    variables=("ATEN_", *KERNEL_VARIABLES),
    set_threads=TorchModel.set_threads,
    reads_values=True,
    walks=True,
    holds=_holds,
)
