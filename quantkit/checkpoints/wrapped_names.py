"""Names of tensors without the parts that module wrappers add: torch.compile, DistributedDataParallel, FSDP, peft."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

ANYWHERE = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
PARALLEL = "module."
PEFT = "base_model.model."
Value = TypeVar("Value")


def unwrapped(tensors: Mapping[str, Value], first: tuple[str, ...] = (PARALLEL, PEFT)) -> dict[str, Value]:
    """The tensors by their names in the unwrapped model; unchanged where two of those would be the same.

    A prefix in `first` is cut only where every name has it.
    """
    names = {name: ANYWHERE.sub("", name) for name in tensors}
    while names and (cut := [prefix for prefix in first if all(name.startswith(prefix) for name in names.values())]):
        names = {name: short.removeprefix(cut[0]) for name, short in names.items()}
    if len(set(names.values())) < len(names):
        return dict(tensors)
    return {names[name]: value for name, value in tensors.items()}
