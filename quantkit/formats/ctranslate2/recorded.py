"""Tensors without values that remember how they come about, so that each can be made when it is wanted.

CTranslate2's converter takes a whole model of transformers, and transposes, cuts and joins its weights. Here it is
given a model whose weights are `Recorded`: what it does to them is written down on tensors of the device "meta", and
`Recorder.value` carries out what one of its results needs, on weights that are read then. The converter's own code
decides what is done, and one result is in memory at a time. Changes in place reach all views, as with real tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class _Step:
    """An operation with what it was called with; `first` is the number of the first tensor that it gives."""

    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]


class Recorded(torch.Tensor):
    """A tensor with a shape and a dtype, whose values a `Recorder` knows how to make.

    `number` is its own, `root` that of the tensor whose memory it shares, `meta` its shape, dtype and strides.
    """

    recorder: Recorder
    number: int
    root: int
    meta: torch.Tensor

    @staticmethod
    def __new__(cls, meta: torch.Tensor) -> Recorded:
        """One of the shape, strides and dtype of `meta`."""
        made: Recorded = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device("cpu"),
        )
        made.meta = meta
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Recorded({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Write an operation down."""
        kwargs = kwargs or {}
        recorder = next(_recorded((args, kwargs))).recorder
        metas = _mapped(_meta_of, (args, kwargs))
        return recorder.record(func, args, kwargs, func(*metas[0], **metas[1]))


class Recorder:
    """Where operations on `Recorded` tensors are written down, in their order."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._made_by: dict[int, int] = {}  # number of a tensor: number of its step
        self._changed_by: dict[int, list[int]] = defaultdict(list)  # number of a root: steps that change its memory

    def leaf(self, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> Recorded:
        """A tensor whose values `read` gives, in memory of its own each time."""
        return self._made(torch.empty(shape, dtype=dtype, device="meta"), read, (), {}, None)

    def record(self, operation: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """What an operation gives, `result` on the device "meta" being its shape."""
        shared = [a for a in operation._schema.arguments if a.alias_info is not None]
        if any(a.alias_info.is_write for a in shared):
            target: Recorded = args[0]
            self._changed_by[target.root].append(len(self._steps))
            self._steps.append(_Step(operation, args, kwargs, ()))
            return target
        base = args[0].root if shared else None
        if isinstance(result, torch.Tensor):
            return self._made(result, operation, args, kwargs, base)
        made = [self._wrap(part, base) for part in result]
        self._add(_Step(operation, args, kwargs, tuple(part.number for part in made)))
        return type(result)(made)

    def _made(self, meta: torch.Tensor, operation: Any, args: Any, kwargs: Any, base: int | None) -> Recorded:
        made = self._wrap(meta, base)
        self._add(_Step(operation, args, kwargs, (made.number,)))
        return made

    def _wrap(self, meta: torch.Tensor, base: int | None) -> Recorded:
        made = Recorded(meta)
        made.recorder, made.number = self, len(self._made_by)
        made.root = made.number if base is None else base
        self._made_by[made.number] = -1
        return made

    def _add(self, step: _Step) -> None:
        self._made_by.update(dict.fromkeys(step.outputs, len(self._steps)))
        self._steps.append(step)

    def value(self, wanted: Recorded) -> torch.Tensor:
        """The values of one of them: reads what it is made of, and carries out the steps that it needs."""
        needed: set[int] = set()
        ahead = [wanted]
        while ahead:
            tensor = ahead.pop()
            for number in (self._made_by[tensor.number], *self._changed_by[tensor.root]):
                if number not in needed:
                    needed.add(number)
                    ahead += _recorded((self._steps[number].args, self._steps[number].kwargs))
        values: dict[int, torch.Tensor] = {}
        for number in sorted(needed):
            step = self._steps[number]
            args, kwargs = _mapped(lambda part: values[part.number], (step.args, step.kwargs))
            result = step.operation(*args, **kwargs)
            values.update(zip(step.outputs, [result] if isinstance(result, torch.Tensor) else result, strict=False))
        return values[wanted.number]


def _recorded(parts: Any) -> Iterator[Recorded]:
    """All of them among arguments."""
    if isinstance(parts, Recorded):
        yield parts
    elif isinstance(parts, Mapping | list | tuple):
        for part in parts.values() if isinstance(parts, Mapping) else parts:
            yield from _recorded(part)


def _mapped(change: Callable[[Recorded], Any], parts: Any) -> Any:
    """Arguments with each `Recorded` changed."""
    if isinstance(parts, Recorded):
        return change(parts)
    if isinstance(parts, Mapping):
        return {key: _mapped(change, part) for key, part in parts.items()}
    if isinstance(parts, list | tuple):
        return type(parts)(_mapped(change, part) for part in parts)
    return parts


def _meta_of(part: Recorded) -> torch.Tensor:
    return part.meta
