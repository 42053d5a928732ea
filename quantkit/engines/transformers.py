"""transformers: the source model as users run it, and NF4 through bitsandbytes."""

from __future__ import annotations

import torch

from quantkit.contracts.engine import KERNEL_VARIABLES, Engine, LoadSpec, refuse_dtype
from quantkit.contracts.model import Model
from quantkit.engines._torch_model import TorchModel
from quantkit.errors import EngineError, missing_package
from quantkit.system.device import refuse_device
from quantkit.untrusted import told

DTYPES = ("bfloat16", "float16", "float32")


def _refuse(dtype: str | None, device: str) -> None:
    refuse_dtype("transformers", dtype, DTYPES)
    refuse_device(device)


def _load(model: Model, spec: LoadSpec) -> TorchModel:
    from transformers import AutoModelForCausalLM

    if model.format == "bitsandbytes":
        try:
            import bitsandbytes  # noqa: F401
        except ImportError as error:
            raise missing_package("bitsandbytes", "bitsandbytes", error) from None
    torch.set_num_threads(spec.threads)
    with told(f"transformers cannot load {model.folder}", EngineError):
        loaded, about = AutoModelForCausalLM.from_pretrained(
            model.folder,
            dtype=spec.dtype or "auto",
            trust_remote_code=False,
            use_safetensors=True,
            device_map=None if spec.device == "cpu" else spec.device,
            output_loading_info=True,
        )
    if missing := sorted(about["missing_keys"]):
        raise EngineError(
            f"{model.folder} has no tensor for {len(missing)} parameters of {type(loaded).__name__}, such as "
            f"{missing[0]}: transformers would make up values. Give the config.json that belongs to these weights."
        )
    notes: tuple[str, ...] = ()
    if unused := sorted(about["unexpected_keys"]):
        notes = (f"transformers leaves out {len(unused)} tensors of the checkpoint, such as {unused[0]}",)
    return TorchModel(loaded.eval(), str(loaded.dtype).removeprefix("torch."), notes)


ENGINE = Engine(
    name="transformers",
    summary="Hugging Face transformers, with bitsandbytes for NF4",
    module="transformers",
    install="Install it with: pip install quantkit",
    opens="it loads source models and nf4 artifacts here (GPTQ and AWQ need the package gptqmodel)",
    load=_load,
    devices=("cpu", "cuda", "cuda:N"),
    refuse=_refuse,
    variables=("ATEN_", "BNB_", *KERNEL_VARIABLES),
    set_threads=TorchModel.set_threads,
)
