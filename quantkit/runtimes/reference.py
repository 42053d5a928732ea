"""Reference: our own reader of the artifact's bytes, computed by plain torch through transformers' module code.

4-bit GPTQ, RTN and AWQ layers decode on torch's int4 kernel; everything else is dense in bfloat16 (or `dtype`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit.core.grouped import GroupedWeight
from quantkit.core.int4 import Int4Linear, kernel_takes
from quantkit.core.torch_model import TorchModel
from quantkit.errors import ArtifactError, RecipeError
from quantkit.registry import LoadSpec, Runtime, find_method
from quantkit.skeleton import Skeleton, open_skeleton, set_parameter, source_name
from quantkit.subject import Subject

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def _tensors(subject: Subject, skeleton: Skeleton) -> Iterator[tuple[str, torch.Tensor | GroupedWeight]]:
    if subject.artifact is not None:
        yield from find_method(subject.artifact.manifest.recipe.method).read(subject.artifact)
        return
    assert subject.source is not None
    for name in sorted(skeleton.parameter_names()):
        yield name, subject.source.tensor(source_name(subject.source, skeleton, name))


def _load(subject: Subject, spec: LoadSpec) -> TorchModel:
    name = spec.dtype or "bfloat16"
    if name not in DTYPES:
        raise RecipeError(f"the runtime reference has no dtype {name!r}; it has {', '.join(DTYPES)}")
    dtype = DTYPES[name]
    torch.set_num_threads(spec.threads)
    skeleton = open_skeleton(subject.config)
    model = skeleton.model
    wanted = set(skeleton.parameter_names())
    prefix = f"{model.base_model_prefix}."
    for stored, value in _tensors(subject, skeleton):
        parameter = next((n for n in (stored, prefix + stored, stored.removeprefix(prefix)) if n in wanted), None)
        if parameter is None:
            continue
        wanted.discard(parameter)
        if isinstance(value, GroupedWeight) and kernel_takes(value) and dtype == torch.bfloat16:
            path = parameter.removesuffix(".weight")
            bias = model.get_submodule(path).bias  # empty for now; set like every other parameter when it comes
            model.set_submodule(path, Int4Linear(value, bias, dtype))
        else:
            dense = value.dense() if isinstance(value, GroupedWeight) else value
            set_parameter(model, parameter, dense.to(dtype))
    if wanted:
        raise ArtifactError(f"{subject.folder} gives no values for {min(wanted)}; convert again")
    model.tie_weights()
    return TorchModel(model, name)


RUNTIME = Runtime(
    name="reference",
    summary="our reader of the artifact's bytes, computed in torch",
    package="torch",
    refuses=lambda _subject: None,
    load=_load,
)
