"""Where the parameters of a rebuilt model lie in its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Origin:
    """Where the value of a parameter lies when it is not simply the tensor of its own name.

    `name` and `shape` are the checkpoint's tensor, `also` another name that it may have; `transposed`: it is (in, out);
    `expert` and its `rows` (first, end, step) cut one matrix or bias out of a stack (experts, out, in); `rows` alone
    are a part of what is joined.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    expert: int | None = None
    rows: tuple[int, int, int] = (0, 0, 1)
    also: str = ""


def cut(origin: Origin, rows: Callable[[str, int, int], torch.Tensor]) -> torch.Tensor:
    """The parameter's value (out, in) by way of `rows(name, start, stop)`, which reads rows of a stored tensor."""
    if origin.expert is not None:
        one = rows(origin.name, origin.expert, origin.expert + 1)[0]
        return (one.T if origin.transposed else one)[slice(*origin.rows)].contiguous()
    first, end, _ = origin.rows
    whole = rows(origin.name, first, end or origin.shape[0])
    return whole.T.contiguous() if origin.transposed else whole
