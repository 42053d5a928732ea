"""Reference: our own reader of the artifact's bytes, computed by plain torch through transformers' module code.

GPTQ, RTN and AWQ layers of up to 4 bits decode on torch's int4 kernel; layers of 8-bit values with inputs of 8 bits
round these as vLLM's kernels do; all else is dense in bfloat16 (or `dtype`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from quantkit.checkpoints.rows import Rows, rows_in_memory
from quantkit.contracts.engine import KERNEL_VARIABLES, Engine, LoadSpec, refuse_dtype
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_format
from quantkit.contracts.stored import open_stored, stored_values
from quantkit.engines._int4_linear import Int4Linear, kernel_takes
from quantkit.engines._scaled_linear import ScaledLinear
from quantkit.engines._torch_model import TorchModel
from quantkit.errors import ArtifactError, EngineError
from quantkit.models.leftovers import leftovers
from quantkit.models.skeleton import Skeleton, load, open_skeleton, set_parameter
from quantkit.models.unfuse import cut
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.numerics.scaled.weight import ScaledWeight
from quantkit.system.device import refuse_device
from quantkit.untrusted import told

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def _tensors(model: Model, skeleton: Skeleton) -> Iterator[tuple[str, torch.Tensor | GroupedWeight | ScaledWeight]]:
    """Yield the skeleton's parameters by name, each in the shape that its module takes."""
    names = set(skeleton.parameter_names())
    if model.artifact is None:
        if model.source is None:
            raise EngineError("a model that is neither an artifact nor a source cannot be computed")
        for name in sorted(names):
            yield name, load(model.source, skeleton, name)
        return
    prefix = f"{skeleton.model.base_model_prefix}."
    stacks = _stacks(skeleton)
    for stored, value in stored_values(open_stored(model.artifact, find_format(model.format))):
        every = (stored, prefix + stored, stored.removeprefix(prefix))
        known = next((name for name in every if name in names or name in stacks), None)
        if known in stacks and isinstance(value, torch.Tensor | Rows):
            rows = value if isinstance(value, Rows) else rows_in_memory(value)
            for parameter in stacks[known]:
                yield parameter, cut(skeleton.origins[parameter], partial(_rows, rows))
        elif known is not None:
            tensor = torch.from_numpy(value.whole()) if isinstance(value, Rows) else value
            origin = skeleton.origins.get(known)
            # Codes are those of a linear layer; a dense tensor is as the source stores it.
            if isinstance(tensor, torch.Tensor) and origin is not None and origin.transposed and origin.expert is None:
                tensor = tensor.T.contiguous()
            yield known, tensor


def _stacks(skeleton: Skeleton) -> dict[str, list[str]]:
    """By each name of a stack of experts, the parameters that are cut out of it."""
    stacks: dict[str, list[str]] = {}
    for parameter, origin in skeleton.origins.items():
        for name in {origin.name, origin.also} - {""} if origin.expert is not None else ():
            stacks.setdefault(name, []).append(parameter)
    return stacks


def _rows(rows: Rows, _name: str, start: int, stop: int) -> torch.Tensor:
    return torch.from_numpy(rows.read(start, stop))


def _refuse(dtype: str | None, device: str) -> None:
    refuse_dtype("reference", dtype, DTYPES)
    refuse_device(device)


def _load(model: Model, spec: LoadSpec) -> TorchModel:
    with told(f"our own reader cannot load {model.folder}", EngineError, "Run `quantkit verify` on it."):
        return _filled(model, spec)


def _filled(model: Model, spec: LoadSpec) -> TorchModel:
    name = spec.dtype or "bfloat16"
    dtype = DTYPES[name]
    torch.set_num_threads(spec.threads)
    skeleton = open_skeleton(model.config)
    module = skeleton.model
    if model.source is not None:
        leftovers(model.source, skeleton)  # refuses blocks beyond those of config.json
    missing, notes, linears = set(skeleton.parameter_names()), set(), skeleton.linears()
    for parameter, value in _tensors(model, skeleton):
        missing.discard(parameter)
        if (shape := tuple(module.get_parameter(parameter).shape)) != tuple(value.shape):
            raise ArtifactError(
                f"{model.folder}: {parameter} has the shape {tuple(value.shape)}, not {shape}; convert again"
            )
        path = parameter.removesuffix(".weight")
        bias = getattr(module.get_submodule(path), "bias", None) if path != parameter else None
        # A bias is empty for now, and set like every other parameter when it comes.
        on_kernel = parameter in linears and (spec.device, dtype) == ("cpu", torch.bfloat16)
        if on_kernel and isinstance(value, GroupedWeight) and kernel_takes(value):
            module.set_submodule(path, Int4Linear(value, bias, dtype))
        elif isinstance(value, ScaledWeight) and value.inputs is not None:
            module.set_submodule(path, ScaledLinear(value.to(spec.device), bias, dtype))
            notes.add(f"inputs of quantized layers are rounded as vLLM does: {value.inputs.words}")
        else:
            dense = value if isinstance(value, torch.Tensor) else value.dense()
            set_parameter(module, parameter, dense.to(spec.device, dtype))
    if missing:
        raise ArtifactError(f"{model.folder} gives no values for {min(missing)}; convert again")
    module.tie_weights()
    module.to(spec.device)  # its buffers
    return TorchModel(module, name, tuple(sorted(notes)))


ENGINE = Engine(
    name="reference",
    summary="our reader of the artifact's bytes, computed in torch",
    module="torch",
    install="Install it with: pip install quantkit",
    opens="it opens every format",
    load=_load,
    devices=("cpu", "cuda", "cuda:N"),
    refuse=_refuse,
    variables=("ATEN_", *KERNEL_VARIABLES),
    set_threads=TorchModel.set_threads,
    reads_values=True,
)
