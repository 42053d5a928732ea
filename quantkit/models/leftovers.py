"""Tensors of a checkpoint that its model does not have: refused, left out with a word, or known to say nothing."""

from __future__ import annotations

import re

from quantkit.errors import SourceError, UnsupportedError
from quantkit.models.skeleton import Skeleton, source_name
from quantkit.models.source import SLAB_BYTES, Source


def left_out(source: Source, skeleton: Skeleton) -> tuple[list[str], tuple[str, ...]]:
    """(names of the tensors that the model does not use, notes on those that the user should know of).

    Copies of tied weights and stored buffers, such as masks, say nothing. Raises UnsupportedError for decoder blocks
    beyond those that config.json counts, SourceError for a copy of a tied weight that differs from it.
    """
    model = skeleton.model
    stored = {name: source_name(source, skeleton, name) for name in skeleton.parameter_names()}
    unused = [name for name in source.tensors if name not in stored.values()]
    if not unused:
        return [], ()
    prefix = f"{model.base_model_prefix}."
    plain = {name: name.removeprefix(prefix) for name in unused}
    tied = _tied(skeleton, prefix)
    buffers = {name.removeprefix(prefix) for name, _ in model.named_buffers()}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    block = re.compile(rf"{re.escape(skeleton.blocks_path.removeprefix(prefix))}\.(\d+)\.")
    told = []
    for name in unused:
        found = block.match(plain[name])
        if plain[name] in tied:
            _refuse_other_values(source, name, stored[tied[plain[name]]])
        elif any(pattern.search(name) for pattern in ignored) or found is None:
            if plain[name] not in buffers:
                told.append(name)
        elif int(found[1]) >= len(skeleton.blocks):
            raise UnsupportedError(
                f"{source.model}: config.json counts {len(skeleton.blocks)} decoder blocks, and the checkpoint has the "
                f"tensor {name} of a further one. Give the config.json that belongs to these weights."
            )
        elif plain[name] not in buffers:
            told.append(name)
    if not told:
        return unused, ()
    first = ", ".join(told[:3]) + (", ..." if len(told) > 3 else "")
    count = sum(source.tensors[name].parameters for name in told)
    plural = "s" if len(told) > 1 else ""
    return unused, (
        f"{len(told)} tensor{plural} of the source ({count:,} values) are no part of its architecture in transformers "
        f"and are left out: {first}",
    )


def _tied(skeleton: Skeleton, prefix: str) -> dict[str, str]:
    """By its other name (without the base model's prefix), each parameter that has two."""
    names = {id(value): name for name, value in reversed(list(skeleton.model.named_parameters()))}
    return {
        name.removeprefix(prefix): names[id(value)]
        for name, value in skeleton.model.named_parameters(remove_duplicate=False)
        if names[id(value)] != name
    }


def _refuse_other_values(source: Source, copy: str, name: str) -> None:
    one, other = source.tensors[copy], source.tensors[name]
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    rows = one.shape[0] if one.shape else 1
    step = max(1, rows * SLAB_BYTES // max(one.nbytes, 1))
    for start in range(0, rows if same else 0, step):
        stop = min(start + step, rows)
        same = same and bool((source.read_rows(copy, start, stop) == source.read_rows(name, start, stop)).all())
    if not same:
        raise SourceError(
            f"{source.model}: config.json ties {copy} to {name}, and the checkpoint holds other values for it. "
            "Set tie_word_embeddings to false in config.json, or remove the tensor that is wrong."
        )
