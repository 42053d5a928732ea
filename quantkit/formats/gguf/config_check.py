"""Proof that a checkpoint says what a GGUF file says: the file that would be written from it has the same keys.

transformers reads some architectures' keys only in part, and a checkpoint with a wrong rope or without its biases loads
and computes something else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.plan import IGNORED, make_plan
from quantkit.models.skeleton import open_skeleton, refuse_shapes, source_name
from quantkit.models.source import Source

# What llama.cpp takes where a file says nothing.
SILENT: Mapping[str, Any] = {"rope.freq_base": 10000.0, "rope.freq_base_swa": 10000.0, "attention.sliding_window": 0}
# Keys that say nothing of what is computed, or nothing that others do not.
IDLE = ("vocab_size", "rope.scaling.finetuned")
CLOSE = 1e-6  # relative; files hold float32


def own_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file's own architecture, without its name in front."""
    prefix = f"{keys['general.architecture']}."
    return {key.removeprefix(prefix): value for key, value in keys.items() if key.startswith(prefix)}


def refuse_other_meaning(source: Source, keys: Mapping[str, Any], factors: Mapping[str, Any]) -> None:
    """Raise UnsupportedError where the checkpoint `source` is not what a GGUF file with these keys computes.

    `factors` are the file's rope divisors by name. Raises SourceError where tensors are missing.
    """
    plan = make_plan(source, "F32")
    name = plan.architecture.name
    if name != keys["general.architecture"]:
        raise UnsupportedError(f"its config.json is of the architecture {name}")
    given, meant = own_keys(keys), plan.shape.all_keys
    silent = {**SILENT, "rope.dimension_count": plan.shape.head_dim, "attention.head_count_kv": plan.shape.heads}
    head = plan.shape.hidden // plan.shape.heads
    silent |= {"attention.key_length": head, "attention.value_length": head, "expert_count": 0}
    for key in sorted((meant.keys() | given.keys()) - set(IDLE)):
        says, means = given.get(key, silent.get(key)), meant.get(key, silent.get(key))
        if not _same(says, means):
            raise UnsupportedError(f"the file says {key} = {says}, its config.json means {means}")
    if factors.keys() != plan.shape.factors.keys() or not all(
        np.allclose(values, factors[k], rtol=CLOSE, atol=0) for k, values in plan.shape.factors.items()
    ):
        raise UnsupportedError("the file's rope has other divisors than its config.json means")
    skeleton = open_skeleton(source.config)
    refuse_shapes(source, skeleton)
    used = {source_name(source, skeleton, parameter) for parameter in skeleton.parameter_names()}
    if unused := [tensor for tensor in source.tensors if tensor not in used and not tensor.endswith(IGNORED)]:
        raise UnsupportedError(f"the file has a tensor for {unused[0]}, its config.json has none")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if {type(one), type(other)} <= {int, float}:
        return math.isclose(one, other, rel_tol=CLOSE)
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
