"""Reference: our own reader of the artifact's bytes, computed by plain torch through transformers' module code.

GPTQ, RTN and AWQ layers of up to 4 bits decode on torch's int4 kernel; all else is dense in bfloat16 (or `dtype`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit.checkpoints.rows import Rows
from quantkit.contracts.engine import Engine, LoadSpec, refuse_dtype
from quantkit.contracts.model import Subject
from quantkit.contracts.registry import find_method
from quantkit.engines._int4_linear import Int4Linear, kernel_takes
from quantkit.engines._torch_model import TorchModel
from quantkit.errors import ArtifactError
from quantkit.models.skeleton import Skeleton, load, open_skeleton, set_parameter
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.system.device import refuse_device

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def _tensors(subject: Subject, skeleton: Skeleton) -> Iterator[tuple[str, torch.Tensor | GroupedWeight]]:
    """Yield the skeleton's parameters by name, each in the shape that its module takes."""
    names = set(skeleton.parameter_names())
    if subject.artifact is None:
        assert subject.source is not None
        for name in sorted(names):
            yield name, load(subject.source, skeleton, name)
        return
    prefix = f"{skeleton.model.base_model_prefix}."
    for stored, value in find_method(subject.artifact.manifest.recipe.method).read(subject.artifact):
        if isinstance(value, Rows):
            value = torch.from_numpy(value.whole())
        for name in (stored, prefix + stored, stored.removeprefix(prefix)):
            if name in names:
                origin = skeleton.origins.get(name)
                # Codes are those of a linear layer; a dense tensor is as the source stores it.
                if isinstance(value, torch.Tensor) and origin is not None and origin.transposed:
                    value = value.T.contiguous()
                yield name, value
                break


def _refuse(dtype: str | None, device: str) -> None:
    refuse_dtype("reference", dtype, DTYPES)
    refuse_device(device)


def _load(subject: Subject, spec: LoadSpec) -> TorchModel:
    name = spec.dtype or "bfloat16"
    dtype = DTYPES[name]
    torch.set_num_threads(spec.threads)
    skeleton = open_skeleton(subject.config)
    model = skeleton.model
    wanted = set(skeleton.parameter_names())
    for parameter, value in _tensors(subject, skeleton):
        wanted.discard(parameter)
        if isinstance(value, GroupedWeight) and kernel_takes(value) and (spec.device, dtype) == ("cpu", torch.bfloat16):
            path = parameter.removesuffix(".weight")
            bias = model.get_submodule(path).bias  # empty for now; set like every other parameter when it comes
            model.set_submodule(path, Int4Linear(value, bias, dtype))
        else:
            dense = value.dense() if isinstance(value, GroupedWeight) else value
            set_parameter(model, parameter, dense.to(spec.device, dtype))
    if wanted:
        raise ArtifactError(f"{subject.folder} gives no values for {min(wanted)}; convert again")
    model.tie_weights()
    model.to(spec.device)  # its buffers
    return TorchModel(model, name)


ENGINE = Engine(
    name="reference",
    summary="our reader of the artifact's bytes, computed in torch",
    module="torch",
    install="Install it with: pip install quantkit",
    refuses=lambda _subject: None,
    load=_load,
    devices=("cpu", "cuda", "cuda:N"),
    refuse=_refuse,
)
