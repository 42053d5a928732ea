"""Tensors of a checkpoint that its model does not have: refused, beside the model, or known to say nothing."""

from __future__ import annotations

import re

from quantkit.errors import UnsupportedError
from quantkit.models.skeleton import Skeleton, source_name
from quantkit.models.source import Source, refuse_other_values


def leftovers(source: Source, skeleton: Skeleton) -> tuple[list[str], list[str], list[str]]:
    """(names of the tensors that say nothing, of those of layers without use, of those that are beside the model).

    Copies of tied weights and stored buffers, such as masks, say nothing. A layer is without use where transformers
    knows that its block does not have it, and other blocks do: keys and values where those of others are taken.
    Raises UnsupportedError for decoder blocks beyond those that config.json counts, but for those that transformers
    knows to lie there; SourceError for a copy of a tied weight that differs from it.
    """
    model = skeleton.model
    stored = {name: source_name(source, skeleton, name) for name in skeleton.parameter_names()}
    unused = [name for name in source.tensors if name not in stored.values()]
    if not unused:
        return [], [], []
    prefix = f"{model.base_model_prefix}."
    plain = {name: name.removeprefix(prefix) for name in unused}
    tied = _tied(skeleton, prefix)
    buffers = {name.removeprefix(prefix) for name, _ in model.named_buffers()}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    block = re.compile(rf"{re.escape(skeleton.blocks_path.removeprefix(prefix))}\.(\d+)\.")
    layers = {name for one in skeleton.blocks for name, _ in one.named_parameters()}
    useless, beside = [], []
    for name in unused:
        found = block.match(plain[name])
        known = any(pattern.search(name) for pattern in ignored)
        if plain[name] in tied:
            refuse_other_values(source, name, stored[tied[plain[name]]])
        elif known and found and int(found[1]) < len(skeleton.blocks) and plain[name][found.end() :] in layers:
            useless.append(name)
        elif known or found is None:
            if plain[name] not in buffers:
                beside.append(name)
        elif int(found[1]) >= len(skeleton.blocks):
            raise UnsupportedError(
                f"{source.model}: config.json counts {len(skeleton.blocks)} decoder blocks, and the checkpoint has the "
                f"tensor {name} of a further one. Give the config.json that belongs to these weights."
            )
        elif plain[name] not in buffers:
            beside.append(name)
    return sorted(set(unused) - set(beside) - set(useless)), useless, beside


def _tied(skeleton: Skeleton, prefix: str) -> dict[str, str]:
    """By its other name (without the base model's prefix), each parameter that has two."""
    names = {id(value): name for name, value in reversed(list(skeleton.model.named_parameters()))}
    return {
        name.removeprefix(prefix): names[id(value)]
        for name, value in skeleton.model.named_parameters(remove_duplicate=False)
        if names[id(value)] != name
    }
