"""transformers: the source model as users run it, NF4 through bitsandbytes, and compressed-tensors' checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from quantkit.contracts.engine import KERNEL_VARIABLES, Engine, Holding, LoadSpec, refuse_dtype
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_format
from quantkit.engines._torch_model import TorchModel
from quantkit.errors import EngineError, missing_package
from quantkit.models.skeleton import load_whole
from quantkit.models.text_half import is_multimodal
from quantkit.system.device import find_device
from quantkit.untrusted import read_object, told

DTYPES = ("bfloat16", "float16", "float32")


def _load(model: Model, spec: LoadSpec) -> TorchModel:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if package := find_format(model.format).loaded_by(ENGINE.name).package:
        try:
            import_module(package)
        except ImportError as error:
            raise missing_package(package, model.format, error) from None  # its extra has the format's name
    _refuse_misread(model, spec.dtype, spec.device)
    torch.set_num_threads(spec.threads)
    device = None if spec.device == "cpu" else spec.device
    with told(f"transformers cannot load {model.folder}", EngineError):
        if model.source is not None and (model.source.text_prefixes is not None or not model.source.own_files):
            dtype = spec.dtype or dtype_of(model.source.config)
            loaded, about = load_whole(model.source, dtype=dtype, device_map=device)
        else:
            kind = AutoModelForImageTextToText if is_multimodal(_config_of(model)) else AutoModelForCausalLM
            loaded, about = kind.from_pretrained(
                model.folder,
                dtype=spec.dtype or "auto",
                trust_remote_code=False,
                use_safetensors=True,
                device_map=device,
                output_loading_info=True,
            )
    if missing := sorted(about["missing_keys"]):
        raise EngineError(
            f"{model.folder} has no tensor for {len(missing)} parameters of {type(loaded).__name__}, such as "
            f"{missing[0]}: transformers would make up values. Give the config.json that belongs to these weights."
        )
    notes: tuple[str, ...] = ()
    if unused := sorted(about["unexpected_keys"]):
        _refuse_further_blocks(model, loaded, unused)
        notes = (f"transformers leaves out {len(unused)} tensors of the checkpoint, such as {unused[0]}",)
    return TorchModel(loaded.eval(), str(loaded.dtype).removeprefix("torch."), notes)


def _config_of(model: Model) -> dict[str, Any]:
    return read_object(model.folder / "config.json", EngineError, "Fetch it again.")


def _refuse_misread(model: Model, dtype: str | None, device: str) -> None:
    """Raise EngineError for artifacts whose layers would be computed wrongly, or not at all."""
    if model.artifact is not None:
        find_format(model.format).loaded_by(ENGINE.name).refuse(model.artifact, dtype, device)


def dtype_of(config: Mapping[str, Any]) -> str:
    """The type that config.json names, as transformers takes it by itself; float32 where it names none."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def _refuse_further_blocks(model: Model, loaded: Any, unused: list[str]) -> None:
    """Raise EngineError where an unused tensor is one of a decoder block beyond those of config.json."""
    prefix = f"{loaded.base_model_prefix}."
    for path, part in loaded.named_modules():
        if not isinstance(part, torch.nn.ModuleList):
            continue
        block = re.compile(rf"{re.escape(path.removeprefix(prefix))}\.(\d+)\.")
        for name in unused:
            found = block.match(name.removeprefix(prefix))
            if found and int(found[1]) >= len(part):
                raise EngineError(
                    f"{model.folder}: config.json counts {len(part)} decoder blocks, and the checkpoint has the tensor "
                    f"{name} of a further one. Give the config.json that belongs to these weights."
                )


def _holds(holding: Holding, dtype: str | None) -> int:
    loading = find_format(holding.format).loaded_by(ENGINE.name)
    if loading.stays_packed(holding.bits):
        return holding.weight_bytes
    item = 4 if (dtype or holding.dtype) == "float32" else 2
    return holding.parameters * item + (holding.weight_bytes if loading.weights == "both" else 0)


ENGINE = Engine(
    name="transformers",
    summary="Hugging Face transformers, with bitsandbytes for NF4 and with compressed-tensors",
    module="transformers",
    install="Install it with: pip install quantkit",
    opens="it loads source models, bitsandbytes and compressed-tensors artifacts here (GPTQ and AWQ need gptqmodel)",
    load=_load,
    find_device=find_device,
    refuse=lambda dtype: refuse_dtype("transformers", dtype, DTYPES),
    refuse_model=_refuse_misread,
    process="forked",
    variables=("ATEN_", "BNB_", *KERNEL_VARIABLES),
    set_threads=TorchModel.set_threads,
    reads_values=True,
    holds=_holds,
)
