"""Engine transformers: source models as users run them, NF4 by bitsandbytes, and compressed-tensors checkpoints."""

from __future__ import annotations

from importlib import import_module

import torch

from quantkit.contracts.engine import KERNEL_VARIABLES, Engine, LoadSpec, WeightStats, refuse_dtype
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_format
from quantkit.engines._torch_model import TorchModel
from quantkit.errors import EngineError, missing_package, pip_line
from quantkit.models.config import padding_fix
from quantkit.models.skeleton import leftovers, load_whole, open_skeleton
from quantkit.models.text_half import is_multimodal
from quantkit.system.device import find_device
from quantkit.system.untrusted import read_object, reraise_as

DTYPES = ("bfloat16", "float16", "float32")


def _load(model: Model, spec: LoadSpec) -> TorchModel:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if package := find_format(model.format).loaded_by(ENGINE.name).package:
        try:
            import_module(package)
        except ImportError as error:
            raise missing_package(package, model.format, error) from None  # the extra has the format's name
    _refuse_misread(model, spec.dtype, spec.device)
    torch.set_num_threads(spec.threads)
    device = None if spec.device == "cpu" else spec.device
    with reraise_as(f"transformers cannot load {model.folder}", EngineError, padding_fix(model.config)):
        if model.source is not None and (model.source.text_prefixes is not None or not model.source.own_files):
            loaded, about = load_whole(model.source, dtype=spec.dtype or model.dtype, device_map=device)
        else:
            config = read_object(model.folder / "config.json", EngineError, "Fetch it again.")
            kind = AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM
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
            f"{missing[0]}: transformers would use random values. Give the config.json that belongs to these weights."
        )
    notes: tuple[str, ...] = ()
    if unused := sorted(about["unexpected_keys"]):
        if model.source is not None:
            leftovers(model.source, open_skeleton(model.source.config))  # refuses more blocks than config.json counts
        notes = (f"transformers ignores {len(unused)} tensors of the checkpoint, such as {unused[0]}",)
    return TorchModel(loaded.eval(), str(loaded.dtype).removeprefix("torch."), notes)


def _refuse_misread(model: Model, dtype: str | None, device: str) -> None:
    """Raise EngineError for an artifact that transformers would compute wrongly or not at all."""
    if model.artifact is not None:
        find_format(model.format).loaded_by(ENGINE.name).refuse(model.artifact, dtype, device)


def _holds(stats: WeightStats, dtype: str | None) -> int:
    loading = find_format(stats.format).loaded_by(ENGINE.name)
    if loading.stays_packed(stats.bits):
        return stats.weight_bytes
    item = 4 if (dtype or stats.dtype) == "float32" else 2
    return stats.parameters * item + (stats.weight_bytes if loading.weights == "both" else 0)


ENGINE = Engine(
    name="transformers",
    module="transformers",
    install=f"Install it with: {pip_line()}",
    opens="it loads source models, bitsandbytes and compressed-tensors artifacts here (GPTQ and AWQ need gptqmodel)",
    load=_load,
    find_device=find_device,
    refuse=lambda dtype: refuse_dtype("transformers", dtype, DTYPES),
    refuse_model=_refuse_misread,
    process="forked",
    variables=("ATEN_", "BNB_", *KERNEL_VARIABLES),
    sets_threads=True,
    in_torch=True,
    holds=_holds,
)
