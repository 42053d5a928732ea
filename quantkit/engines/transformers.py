"""transformers: the source model as users run it, NF4 through bitsandbytes, and compressed-tensors' checkpoints."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from quantkit.artifact import Artifact
from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.engine import KERNEL_VARIABLES, Engine, LoadSpec, WeightStats, refuse_dtype
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_format
from quantkit.contracts.stored import NamedReader, open_stored
from quantkit.engines._torch_model import TorchModel
from quantkit.errors import EngineError, missing_package
from quantkit.formats.bitsandbytes import NormalFloatReader
from quantkit.formats.bitsandbytes.layers import FOR_CARDS, computed_by_processors, has_bfloat16_units
from quantkit.models.architectures.experts import expert_of
from quantkit.models.leftovers import leftovers
from quantkit.models.skeleton import load_whole, open_skeleton
from quantkit.models.text_half import is_multimodal
from quantkit.system.device import find_device
from quantkit.untrusted import read_object, told

DTYPES = ("bfloat16", "float16", "float32")
# What transformers needs beside it to load a format; quantkit's extra has the format's name.
PACKAGES = {"bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed_tensors"}
# Layouts of compressed-tensors whose weights its package dequantizes to bfloat16, whatever the model computes in.
ONLY_BFLOAT16 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
MISREAD_EXPERTS = ("int-quantized", "nvfp4-pack-quantized")  # by transformers 5.23 with compressed-tensors 0.20


def _load(model: Model, spec: LoadSpec) -> TorchModel:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if (package := PACKAGES.get(model.format)) is not None:
        try:
            import_module(package)
        except ImportError as error:
            raise missing_package(package, model.format, error) from None
    _refuse_misread(model, spec.dtype, spec.device)
    torch.set_num_threads(spec.threads)
    device = None if spec.device == "cpu" else spec.device
    with told(f"transformers cannot load {model.folder}", EngineError):
        if model.source is not None and (model.source.places is not None or not model.source.own_files):
            loaded, about = load_whole(model.source, dtype=spec.dtype or model.dtype, device_map=device)
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
        if model.source is not None:
            leftovers(model.source, open_skeleton(model.source.config))  # refuses blocks beyond those of config.json
        notes = (f"transformers leaves out {len(unused)} tensors of the checkpoint, such as {unused[0]}",)
    return TorchModel(loaded.eval(), str(loaded.dtype).removeprefix("torch."), notes)


def _config_of(model: Model) -> dict[str, Any]:
    return read_object(model.folder / "config.json", EngineError, "Fetch it again.")


def _refuse_misread(model: Model, dtype: str | None, device: str) -> None:
    """Raise EngineError for artifacts whose layers would be computed wrongly, or not at all."""
    if model.artifact is None:
        return
    if model.format == "bitsandbytes" and device == "cpu":
        _refuse_misfits(model.artifact)
    stored = _config_of(model).get("quantization_config")
    kind = stored.get("format") if isinstance(stored, dict) else None
    if kind in ONLY_BFLOAT16 and dtype not in (None, "bfloat16"):
        raise EngineError(
            f"{model.folder}: compressed-tensors makes bfloat16 of {kind}, and the engine transformers cannot compute "
            f"it in {dtype}. Leave --dtype out, or evaluate with --engine reference."
        )
    if kind in MISREAD_EXPERTS:
        names = StoredTensors(model.folder, model.artifact.manifest.weight_files).names()
        if expert := next((name for name in names if expert_of(name)), None):
            raise EngineError(
                f"{model.folder}: transformers stacks experts, and reads those of {kind}, such as {expert}, wrongly or "
                "not at all. Evaluate with --engine reference."
            )


def _refuse_misfits(artifact: Artifact) -> None:
    reader = open_stored(artifact, find_format(artifact.manifest.format))
    assert isinstance(reader, NormalFloatReader | NamedReader)
    units = has_bfloat16_units()
    for name in reader.names():
        shape = reader.quantized_shape(name)
        if shape is not None and not computed_by_processors(shape[0], shape[1], units):
            raise EngineError(
                f"{artifact.folder}: {name} has {shape[0]} x {shape[1]} weights, and {FOR_CARDS}. Evaluate with "
                "--engine reference."
            )


def _holds(stats: WeightStats, dtype: str | None) -> int:
    if stats.format == "bitsandbytes":
        return stats.weight_bytes
    item = 4 if (dtype or stats.dtype) == "float32" else 2
    # compressed-tensors makes dense weights of the codes, which are there until then.
    return stats.parameters * item + (stats.weight_bytes if stats.format == "compressed-tensors" else 0)


ENGINE = Engine(
    name="transformers",
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
