"""The Skeleton: the transformers model of a checkpoint with no weights in memory, and where its parts are.

transformers knows every architecture's modules; quantkit fills them with weights as it needs them.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.errors import UnsupportedError
from quantkit.source import Source, first_line


@dataclass
class Skeleton:
    """`model` on the meta device (buffers real), `blocks_path` the dotted name of its list of decoder blocks."""

    model: Any
    blocks_path: str

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder blocks in order."""
        return self.model.get_submodule(self.blocks_path)

    def block_prefix(self, index: int) -> str:
        """Dotted prefix of the parameters of block `index`, with its final dot."""
        return f"{self.blocks_path}.{index}."

    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) features of every linear layer inside the blocks, by weight name."""
        return {
            f"{self.blocks_path}.{name}.weight": (module.out_features, module.in_features)
            for name, module in self.blocks.named_modules()
            if isinstance(module, nn.Linear)
        }

    def parameter_names(self) -> list[str]:
        """Names of all parameters, tied ones once."""
        return [name for name, _ in self.model.named_parameters()]


def open_config(config: dict[str, Any]) -> Any:
    """The transformers configuration of a config.json's content; raises UnsupportedError."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if "auto_map" in config:
        raise UnsupportedError(
            f"the model type {config.get('model_type')!r} brings its own code, which quantkit does not run. "
            "Use an architecture that transformers knows."
        )
    with tempfile.TemporaryDirectory() as folder:
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        (Path(folder) / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        try:
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
            raise UnsupportedError(
                f"transformers cannot read the config.json of the architecture {config.get('model_type')!r}: "
                f"{first_line(error)}"
            ) from None


def open_skeleton(config: dict[str, Any], attention: str | None = None) -> Skeleton:
    """Build the model of `config` without weights; raises UnsupportedError for what is no causal decoder."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    settings = open_config(config)
    classes = config.get("architectures") or []
    causal = any(name.endswith(("CausalLM", "LMHeadModel")) for name in classes)
    if getattr(settings, "is_decoder", True) is False and not causal:
        raise UnsupportedError(
            f"the architecture {config.get('model_type')!r} is an encoder (is_decoder is not true in its config.json). "
            "Give a causal language model."
        )
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=attention)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"the architecture {config.get('model_type')!r} is no causal language model that transformers can build: "
            f"{first_line(error)}"
        ) from None
    model.tie_weights()
    model.eval()
    count = settings.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return Skeleton(model, name)
    raise UnsupportedError(f"no list of {count} decoder blocks was found in {type(model).__name__}")


def source_name(source: Source, skeleton: Skeleton, parameter: str) -> str:
    """The checkpoint's name of a parameter (some checkpoints leave the base model's prefix out).

    Raises UnsupportedError where the checkpoint has no such tensor.
    """
    prefix = f"{skeleton.model.base_model_prefix}."
    for name in (parameter, parameter.removeprefix(prefix), prefix + parameter):
        if name in source.tensors:
            return name
    raise UnsupportedError(
        f"the checkpoint {source.model} has no tensor for {parameter}. Its names or its fused layout are not the ones "
        f"of {type(skeleton.model).__name__} in transformers."
    )


def set_parameter(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Give the parameter `name` a value without a gradient."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path).register_parameter(leaf, nn.Parameter(value, requires_grad=False))


def refuse_shapes(source: Source, skeleton: Skeleton) -> None:
    """Check that every parameter lies in the checkpoint with the right shape; raises UnsupportedError."""
    for name, parameter in skeleton.model.named_parameters():
        shape = source.tensors[source_name(source, skeleton, name)].shape
        if shape != tuple(parameter.shape):
            raise UnsupportedError(
                f"{source.model}: the tensor {name} has the shape {shape}, but config.json asks for "
                f"{tuple(parameter.shape)}. Give the config.json that belongs to these weights."
            )


def linears_to_quantize(source: Source, skeleton: Skeleton) -> dict[str, tuple[int, int]]:
    """The skeleton's linear layers; raises UnsupportedError where its blocks have none."""
    linears = skeleton.linears()
    if not linears:
        raise UnsupportedError(
            f"the architecture {source.architecture!r} has no linear layers in its blocks to quantize"
        )
    return linears
