"""Skeleton: a checkpoint's transformers model without weights.

Weights are loaded into its modules on demand. Every weight to quantize is in an `nn.Linear` (unfuse.py), so a
parameter may be a slice or the transpose of a checkpoint tensor; `load` returns its value.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from threading import Lock
from typing import Any

import torch
from torch import nn

from quantkit.checkpoints.rows import FLOATS, Rows, rows_in_memory
from quantkit.errors import UnsupportedError
from quantkit.models.architectures import running
from quantkit.models.config import context_of, open_config, padding_fix
from quantkit.models.source import Source, refuse_other_values
from quantkit.models.unfuse import READ_OUTSIDE, Origin, cut, hold_linears, left_alone, renamed, take_buffers, too_small
from quantkit.numerics.matmul import use_products
from quantkit.system.modules import importing
from quantkit.system.untrusted import reraise_as, shown

LONG_CONTEXT = 1 << 14  # tokens; above this, the size of buffers is checked before they are made
MOST_BUFFER_BYTES = 1 << 30


@dataclass
class Skeleton:
    """A model on the meta device (with real buffers); `blocks_path` is the dotted name of its decoder block list.

    `origins` lists parameters that are not simply the checkpoint tensor of the same name.
    """

    model: Any
    blocks_path: str
    origins: dict[str, Origin] = field(default_factory=dict)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.get_submodule(self.blocks_path)

    def block_prefix(self, index: int) -> str:
        """Return the dotted parameter prefix of block `index`, including the final dot."""
        return f"{self.blocks_path}.{index}."

    def linears_of(self, index: int) -> dict[str, nn.Linear]:
        """Return the linear layers to quantize in block `index`, by weight name."""
        block = self.blocks[index]
        states = getattr(self.model.config.get_text_config(), "altup_num_inputs", 0)
        plain = too_small(block, states) | left_alone(self.model, block)
        return {
            f"{self.block_prefix(index)}{name}.weight": module
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear) and name not in plain
        }

    def left_alone(self) -> list[str]:
        """Return the weight names of linear layers in the blocks that stay unquantized (unfuse.py)."""
        return [
            f"{self.block_prefix(index)}{name}.weight"
            for index, block in enumerate(self.blocks)
            for name in sorted(left_alone(self.model, block))
        ]

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of all linear layers to quantize, by weight name."""
        layers = [layer for index in range(len(self.blocks)) for layer in self.linears_of(index).items()]
        return {name: (layer.out_features, layer.in_features) for name, layer in layers}

    def parameter_names(self) -> list[str]:
        """Return all parameter names; tied parameters appear once."""
        return [name for name, _ in self.model.named_parameters()]


@importing()
def open_skeleton(config: dict[str, Any], native: bool = False, settings: Any = None) -> Skeleton:
    """Build the model of `config` without weights; raise UnsupportedError if it is not a causal decoder.

    `native` keeps transformers' modules, but stored buffers of blocks become parameters. `settings` is the
    transformers configuration, if it already exists.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    settings = open_config(config) if settings is None else settings
    classes = config.get("architectures") or []
    causal = any(name.endswith(("CausalLM", "LMHeadModel")) for name in classes)
    model_type = str(config.get("model_type", ""))
    kind = shown(config.get("model_type"))
    if getattr(settings, "is_decoder", True) is False and not causal:
        raise UnsupportedError(
            f"the architecture {kind} is an encoder (is_decoder is not true in its config.json). "
            "Give a causal language model."
        )

    def build(include_buffers: bool) -> Any:
        # Otherwise random weights would be drawn even on the meta device, which takes longest.
        with init_empty_weights(include_buffers=include_buffers), no_init_weights():
            return AutoModelForCausalLM.from_config(settings, dtype=torch.float32)

    what = f"the architecture {kind} is not a causal language model that transformers can build"
    with reraise_as(what, UnsupportedError, padding_fix(config)):
        if context_of(config) > LONG_CONTEXT:
            _refuse_buffers(build(True), config)
        model = build(False)
        model.tie_weights()
        count = settings.get_text_config().num_hidden_layers
    model.eval()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            if native:
                take_buffers(module)
                return Skeleton(model, name)
            with running(settings, f"{type(model).__name__}, whose blocks are rebuilt"):
                origins = hold_linears(model, name, model_type)
                use_products(model)
            return Skeleton(model, renamed(model_type, name), origins)
    raise UnsupportedError(f"no list of {count} decoder blocks was found in {type(model).__name__}")


def _refuse_buffers(model: Any, config: dict[str, Any]) -> None:
    nbytes = sum(buffer.nbytes for buffer in model.buffers())
    if nbytes > MOST_BUFFER_BYTES:
        raise UnsupportedError(
            f"config.json: a context of {context_of(config):,} tokens needs {nbytes / 1e9:.1f} GB of position "
            f"tables in {type(model).__name__}. Give the config.json that belongs to these weights."
        )


def _place(source: Source, skeleton: Skeleton, parameter: str) -> tuple[str | None, Origin | None]:
    """Return (checkpoint tensor name, origin) of a parameter; the origin is None if it is that whole tensor."""
    prefix = f"{skeleton.model.base_model_prefix}."

    def stored(name: str) -> str | None:  # some checkpoints omit the base model's prefix
        names = (name, name.removeprefix(prefix), prefix + name)
        return next((found for found in names if found in source.tensors), None)

    own, origin = stored(parameter), skeleton.origins.get(parameter)
    if origin is None or (own is not None and (not origin.transposed or origin.expert is not None)):
        return own, None
    return own or stored(origin.name) or (stored(origin.also) if origin.also else None), origin


def _found(source: Source, skeleton: Skeleton, parameter: str) -> tuple[str, Origin | None]:
    """Return the result of `_place`; raise UnsupportedError if the checkpoint lacks the parameter."""
    stored, origin = _place(source, skeleton, parameter)
    if stored is not None:
        return stored, origin
    kind = type(skeleton.model).__name__
    head, table = (
        weight_name(skeleton.model, part)
        for part in (skeleton.model.get_output_embeddings(), skeleton.model.get_input_embeddings())
    )
    if parameter == head != table:
        raise UnsupportedError(
            f"the checkpoint {source.model} has no output head ({parameter}), but config.json does not tie it to the "
            f"embedding. Set tie_word_embeddings to true in config.json if they are the same; otherwise give a "
            f"checkpoint of {kind}."
        )
    used = {_place(source, skeleton, name)[0] for name in skeleton.parameter_names()}
    other = next((f", but {shown(name)[1:-1]}" for name in source.tensors if name not in used), "")
    raise UnsupportedError(
        f"the checkpoint {source.model} has no tensor {parameter}{other}. Give all weights of a {kind} as transformers "
        "names them, and their config.json."
    )


def source_name(source: Source, skeleton: Skeleton, parameter: str) -> str:
    """Return the checkpoint tensor that holds a parameter; raise UnsupportedError if there is none."""
    return _found(source, skeleton, parameter)[0]


def load(source: Source, skeleton: Skeleton, parameter: str) -> torch.Tensor:
    """Return a parameter's value, in the skeleton's shape and the checkpoint's dtype."""
    stored, origin = _found(source, skeleton, parameter)
    if origin is None:
        return source.tensor(stored)
    return cut(origin, lambda _, start, stop: source.rows(stored, start, stop))


def rows_of(source: Source, skeleton: Skeleton, parameter: str) -> Rows:
    """Return a parameter's value as lazily read Rows."""
    stored, origin = _found(source, skeleton, parameter)
    if origin is None:
        return source.in_rows(stored)
    return rows_in_memory(load(source, skeleton, parameter))


def stack_of(source: Source, skeleton: Skeleton, parameter: str) -> str | None:
    """Return transformers' name of the expert stack that holds a parameter in the checkpoint, or None."""
    origin = _place(source, skeleton, parameter)[1]
    return origin.name if origin is not None and origin.expert is not None else None


def set_parameter(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Set the parameter `name` to a value that needs no gradient."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path).register_parameter(leaf, nn.Parameter(value, requires_grad=False))


@contextmanager
def load_block(
    source: Source,
    skeleton: Skeleton,
    index: int,
    device: torch.device,
    dtype: torch.dtype,
    instead: Callable[[str], torch.Tensor | None] = lambda _name: None,
) -> Iterator[nn.Module]:
    """Yield block `index` with its weights, and remove them afterwards; `instead(full name)` may supply values."""
    module, prefix = skeleton.blocks[index], skeleton.block_prefix(index)
    names = list(dict(module.named_parameters()))

    def value_of(name: str) -> torch.Tensor:
        value = instead(name)
        return load(source, skeleton, name) if value is None else value

    try:
        for name in names:
            set_parameter(module, name, value_of(prefix + name).to(device, dtype))
        yield module.to(device)  # its buffers
    finally:
        for name in names:
            set_parameter(module, name, torch.empty_like(module.get_parameter(name), device="meta"))


class _LazyTensor:
    """A source tensor that is read when transformers needs it; threads read one at a time."""

    def __init__(self, source: Source, name: str, lock: Lock) -> None:
        self._read, self._lock = lambda: source.tensor(name), lock

    def __getitem__(self, _all: object) -> torch.Tensor:
        with self._lock:
            return self._read()


def load_whole(source: Source, **how: Any) -> tuple[Any, dict[str, Any]]:
    """Load the source as transformers' own model; return (model, loading report). `how` goes to `from_pretrained`."""
    lock = Lock()
    tensors = {name: _LazyTensor(source, name, lock) for name in source.tensors}
    settings = copy.deepcopy(source.settings)  # building a model changes the dtype in settings
    kind: Any = type(open_skeleton(source.config, native=True, settings=settings).model)
    return kind.from_pretrained(None, config=settings, state_dict=tensors, output_loading_info=True, **how)


def tables(model: nn.Module) -> dict[str, nn.Embedding]:
    """Return embeddings that are only called with indices, such as the token embedding, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and len(signature(module.forward).parameters) == 1
    }


def weight_name(model: Any, layer: nn.Module, parameter: str = "weight") -> str:
    """Return the full name of a layer's parameter; a tied head has the embedding's name."""
    own = getattr(layer, parameter)
    return next(name for name, value in model.named_parameters() if value is own)


def refuse_shapes(source: Source, skeleton: Skeleton) -> None:
    """Raise UnsupportedError for parameters that are missing in the checkpoint, or have another shape or type."""
    for name, parameter in skeleton.model.named_parameters():
        stored, origin = _found(source, skeleton, name)
        info, expected = source.tensors[stored], origin.shape if origin else tuple(parameter.shape)
        if info.dtype not in FLOATS:
            raise UnsupportedError(
                f"{source.model}: the tensor {stored} is stored as {info.dtype}, not as floats. "
                "Give the unquantized model."
            )
        if info.shape != expected:
            raise UnsupportedError(
                f"{source.model}: the tensor {stored} has the shape {info.shape}, but config.json requires "
                f"{expected}. Give the config.json that belongs to these weights."
            )


def stacks(skeleton: Skeleton) -> list[str]:
    """Return parameters in the blocks that still stack several matrices; convolutions are excluded."""
    return [
        f"{skeleton.blocks_path}.{path}.{name}"
        for path, module in skeleton.blocks.named_modules()
        if not isinstance(module, nn.Conv1d)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 2
        and sum(size > 1 for size in parameter.shape) > 1
        and name not in getattr(module, "stored_buffers", ())
    ]


def linears_to_quantize(source: Source, skeleton: Skeleton) -> dict[str, tuple[int, int]]:
    """Return the skeleton's linear layers; raise UnsupportedError if there are none, or if one cannot be quantized."""
    linears = skeleton.linears()
    if not linears:
        raise UnsupportedError(
            f"the architecture {source.architecture!r} has no linear layers in its blocks to quantize"
        )
    if outside := [name for name in linears if name.removesuffix(".weight").endswith(READ_OUTSIDE)]:
        raise UnsupportedError(
            f"the code of the architecture {source.architecture!r} reads {outside[0]} outside its layer, where engines "
            "find no weight after quantization"
        )
    return linears


def leftovers(source: Source, skeleton: Skeleton) -> tuple[list[str], list[str], list[str]]:
    """Return checkpoint tensors that the model does not use: (redundant, of unused layers, outside the model).

    Redundant: copies of tied weights, and stored buffers such as masks. Unused: layers that transformers ignores in one
    block and has in others, such as keys and values of KV-sharing blocks. Raises UnsupportedError for more
    decoder blocks than config.json counts, unless transformers ignores them, and SourceError if a copy of a tied
    weight differs.
    """
    model = skeleton.model
    stored = {name: source_name(source, skeleton, name) for name in skeleton.parameter_names()}
    unused = [name for name in source.tensors if name not in stored.values()]
    if not unused:
        return [], [], []
    prefix = f"{model.base_model_prefix}."
    plain = {name: name.removeprefix(prefix) for name in unused}
    first = {id(value): name for name, value in reversed(list(model.named_parameters()))}
    aliases = model.named_parameters(remove_duplicate=False)
    tied = {name.removeprefix(prefix): first[id(value)] for name, value in aliases if first[id(value)] != name}
    buffers = {name.removeprefix(prefix) for name, _ in model.named_buffers()}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    block = re.compile(rf"{re.escape(skeleton.blocks_path.removeprefix(prefix))}\.(\d+)\.")
    layers = {name for one in skeleton.blocks for name, _ in one.named_parameters()}
    useless, outside = [], []
    for name in unused:
        found = block.match(plain[name])
        known = any(pattern.search(name) for pattern in ignored)
        beyond = found is not None and int(found[1]) >= len(skeleton.blocks)
        if plain[name] in tied:
            refuse_other_values(source, name, stored[tied[plain[name]]])
        elif known and found and not beyond and plain[name][found.end() :] in layers:
            useless.append(name)
        elif beyond and not known:
            raise UnsupportedError(
                f"{source.model}: config.json counts {len(skeleton.blocks)} decoder blocks, but the checkpoint has the "
                f"tensor {name} of another one. Give the config.json that belongs to these weights."
            )
        elif plain[name] not in buffers:
            outside.append(name)
    return sorted(set(unused) - set(outside) - set(useless)), useless, outside
