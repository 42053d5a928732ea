"""A model folder written by CTranslate2's own converter, whose faults are mended, one tensor in memory at a time.

The converter takes a whole model of transformers, and transposes, cuts and joins its weights. Here it is given a model
whose weights are `Recorded`: what it does to them is written down on tensors of the device "meta", and carried out when
a variable of its specification is written (model_file.py has the format). Its own code quantizes the variable, some
rows at a time. So the bytes are those of the engine's own `ModelSpec.save`, which holds all tensors, as they were and
quantized.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from quantkit.errors import UnsupportedError, reason_of
from quantkit.formats.ctranslate2.model_file import TYPES, VERSION
from quantkit.models.config import keep_tokenizer
from quantkit.models.skeleton import open_skeleton, set_parameter, source_name
from quantkit.models.source import Source
from quantkit.progress import Progress
from quantkit.system.temporary import temporary_folder

SLAB = 1 << 22  # values that are quantized at a time
MOST_BYTES = (1 << 32) - 1  # of a variable: its size is stored in 32 bits
Values = torch.Tensor | np.ndarray


def write_model(source: Source, folder: Path, kind: str, progress: Progress | None = None) -> None:
    """Write model.bin, config.json and vocabulary.json into `folder`, beside the tokenizer; raises UnsupportedError."""
    _convert(source, folder, kind, progress or Progress())
    tokenizer = source.tokenizer()
    keep_tokenizer(tokenizer, folder)  # config.json is now CTranslate2's own
    _mend_settings(folder, tokenizer)


def _convert(source: Source, folder: Path, kind: str, progress: Progress) -> None:
    from ctranslate2.converters import TransformersConverter
    from transformers.utils import logging

    recorder = Recorder()

    class Unread(TransformersConverter):
        """The converter itself would load all weights, in the configuration's dtype and not in the stored one."""

        def load_model(self, _class: Any, _path: str, **_settings: Any) -> Any:
            return _unread_model(source, recorder)

    made = folder / "converted"
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # The converter collects garbage after each block: 8.7 s of 10 for the demo model's 30, if everything is looked at.
    gc.freeze()
    try:
        with temporary_folder() as place:  # where it finds config.json and the tokenizer
            (place / "config.json").write_text(json.dumps(source.config), encoding="utf-8")
            source.copy_side_files(place)
            spec = Unread(str(place))._load()
        spec.validate()
        made.mkdir()
        size = sum(math.prod(variable.shape) for _, variable in spec.variables(ordered=True))
        with progress.step("converting with CTranslate2", size, work=True) as advance:
            spec._serialize = lambda path: _write_model_file(Path(path), spec, kind, recorder, advance)
            spec.save(str(made))
    except (ValueError, NotImplementedError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"CTranslate2's converter cannot take {source.model} ({source.architecture}): {reason_of(error)}"
        ) from error
    finally:
        gc.unfreeze()
        if shows_bars:
            logging.enable_progress_bar()
    for path in list(made.iterdir()):
        path.rename(folder / path.name)
    made.rmdir()


def _unread_model(source: Source, recorder: Recorder) -> Any:
    """transformers' model of a source, in the dtype that its weights are stored in, each read when it is asked for."""
    stored = {info.dtype for info in source.tensors.values()}
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(stored.pop() if len(stored) == 1 else "", torch.float32)
    skeleton = open_skeleton(source.config, native=True, settings=copy.deepcopy(source.settings))
    for name in skeleton.parameter_names():
        own = source_name(source, skeleton, name)
        read = partial(_read, source, own, dtype)
        set_parameter(skeleton.model, name, recorder.leaf(source.tensors[own].shape, dtype, read))
    skeleton.model.tie_weights()
    return skeleton.model


def _read(source: Source, name: str, dtype: torch.dtype) -> torch.Tensor:
    return source.tensor(name).to(dtype)


def _mend_settings(folder: Path, tokenizer: Any) -> None:
    """Mend two faults of the converter: null for a missing special token, tokens moved over unused ids."""
    path = folder / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    mended = {key: "" if value is None and key.endswith("_token") else value for key, value in settings.items()}
    path.write_text(json.dumps(mended, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    path = folder / "vocabulary.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    places = tokenizer.get_vocab()
    if any(written[place] != token for token, place in places.items()):
        vocabulary = [f"<extra_id_{i}>" for i in range(len(written))]
        for token, place in places.items():
            vocabulary[place] = token
        path.write_text(json.dumps(vocabulary, indent=2), encoding="utf-8")


# Tensors that remember how they come about. Changes in place reach all views, as with real tensors.


class Recorded(torch.Tensor):
    """A tensor with a shape and a dtype, whose values a `Recorder` knows how to make.

    `number` is its own, `root` that of the tensor whose memory it shares, `meta` its shape, dtype and strides.
    """

    recorder: Recorder
    number: int
    root: int
    meta: torch.Tensor

    @staticmethod
    def __new__(cls, meta: torch.Tensor, recorder: Recorder, number: int, root: int) -> Recorded:
        """One of the shape, strides and dtype of `meta`."""
        made: Recorded = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device("cpu"),
        )
        made.meta, made.recorder, made.number, made.root = meta, recorder, number, root
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Recorded({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Write an operation down."""
        called = (args, kwargs or {})
        positional, named = tree_map_only(Recorded, lambda part: part.meta, called)
        recorder = next(part.recorder for part in tree_leaves(called) if isinstance(part, Recorded))
        return recorder.record(func, called, func(*positional, **named))


@dataclass(frozen=True)
class _Step:
    """An operation, what it was called with (positional, named), and the numbers of the tensors that it gives."""

    operation: Callable[..., Any]
    called: tuple[Any, Any]
    outputs: tuple[int, ...]


class Recorder:
    """Where operations on `Recorded` tensors are written down, in their order."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._made_by: list[int] = []  # by the number of a tensor that of its step
        self._changed_by: dict[int, list[int]] = defaultdict(list)  # number of a root: steps that change its memory

    def leaf(self, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> Any:
        """A tensor whose values `read` gives, in memory of its own each time."""
        return self._add(read, ((), {}), torch.empty(shape, dtype=dtype, device="meta"), None)

    def record(self, operation: Any, called: tuple[Any, Any], result: Any) -> Any:
        """What an operation gives, `result` on the device "meta" being its shape."""
        shared = [a for a in operation._schema.arguments if a.alias_info is not None]
        target = called[0][0] if shared else None
        if target is not None and any(a.alias_info.is_write for a in shared):
            self._changed_by[target.root].append(len(self._steps))
            self._steps.append(_Step(operation, called, ()))
            return target
        return self._add(operation, called, result, target)

    def _add(self, operation: Callable[..., Any], called: tuple[Any, Any], result: Any, base: Recorded | None) -> Any:
        first = len(self._made_by)

        def wrapped(meta: torch.Tensor) -> Recorded:
            number = len(self._made_by)
            self._made_by.append(len(self._steps))
            return Recorded(meta, self, number, number if base is None else base.root)

        made = tree_map_only(torch.Tensor, wrapped, result)
        self._steps.append(_Step(operation, called, tuple(range(first, len(self._made_by)))))
        return made

    def value(self, wanted: Recorded) -> torch.Tensor:
        """The values of one of them: reads what it is made of, and carries out the steps that it needs."""
        needed: set[int] = set()
        ahead = [wanted]
        while ahead:
            tensor = ahead.pop()
            for number in {self._made_by[tensor.number], *self._changed_by[tensor.root]} - needed:
                needed.add(number)
                ahead += [part for part in tree_leaves(self._steps[number].called) if isinstance(part, Recorded)]
        values: dict[int, torch.Tensor] = {}
        for number in sorted(needed):
            step = self._steps[number]
            args, kwargs = tree_map_only(Recorded, lambda part: values[part.number], step.called)
            values.update(zip(step.outputs, tree_leaves(step.operation(*args, **kwargs)), strict=bool(step.outputs)))
        return values[wanted.number]


def _write_model_file(path: Path, spec: Any, kind: str, recorder: Recorder, advance: Callable[[int], None]) -> None:
    """Write the validated `spec` of the engine, quantized to `kind`; `advance` is told of every value.

    Variables with the same values are stored once, as in the engine's own code. Raises UnsupportedError for a variable
    that is too large for the format.
    """
    from ctranslate2.specs.model_spec import SKIP_CREATING_ALIAS

    seen: dict[Any, str] = {}
    aliases: list[tuple[str, str]] = []
    scales: dict[str, np.ndarray] = {}
    with path.open("wb") as file:
        file.write(struct.pack("<I", VERSION) + _text(spec.name) + struct.pack("<I", spec.revision))
        counted, count = file.tell(), 0
        file.write(struct.pack("<I", 0))
        for name, variable in [*spec.variables(ordered=True), ("", None)]:
            for ready in sorted(other for other in scales if not name or other < name):
                array = scales.pop(ready)
                file.write(_head(ready, array.shape, array.dtype.name, array.nbytes) + array.tobytes())
                count += 1
            if not name:
                break
            value, size = _made(variable, recorder), math.prod(variable.shape)
            if variable.shape and name.rpartition("/")[2] not in SKIP_CREATING_ALIAS:
                same = (type(variable), variable.dtype, tuple(variable.shape), _digest(value))
                if seen.setdefault(same, name) != name:
                    aliases.append((name, seen[same]))
                    advance(size)
                    continue
            scale = _write_variable(path, file, spec, name, value, kind)
            if scale is not None:
                scales[f"{name}_scale"] = scale
            count += 1
            advance(size)
        file.write(struct.pack("<I", len(aliases)))
        for alias, holder in aliases:
            file.write(_text(alias) + _text(holder))
        file.seek(counted)
        file.write(struct.pack("<I", count))


def _made(variable: Any, recorder: Recorder) -> Values:
    """The values of a variable of the engine's."""
    held = getattr(variable, "tensor", None)
    if held is None:
        array: np.ndarray = variable.numpy()
        return array
    return (recorder.value(held) if isinstance(held, Recorded) else held).contiguous()


def _slabs(value: Values, rows: int | None = None) -> Iterator[Any]:
    """Some `rows` after the other; by default as many as have `SLAB` values."""
    rows = rows or max(1, SLAB // max(1, math.prod(value.shape[1:])))
    return (value[start : start + rows] for start in range(0, len(value), rows))


def _digest(value: Values) -> bytes:
    """The same for values that are equal: 0 and -0 are."""
    digest = hashlib.sha256()
    for slab in _slabs(value):
        plain = slab + 0
        digest.update(plain.view(torch.uint8).numpy().data if isinstance(plain, torch.Tensor) else plain.tobytes())
    return digest.digest()


def _write_variable(path: Path, file: BinaryIO, spec: Any, name: str, value: Values, kind: str) -> np.ndarray | None:
    """Write one variable as the engine's code quantizes it; return the scales of its codes, where it gives some."""
    from ctranslate2.specs.model_spec import index_spec

    if not value.shape:
        array = np.asarray(value)
        file.write(_head(name, array.shape, array.dtype.name, array.nbytes) + array.tobytes())
        return None
    scope, _, leaf = name.rpartition("/")
    quantized = hasattr(index_spec(spec, scope), f"{leaf}_scale")
    scales: list[np.ndarray] = []
    # The scale of int16 is that of a whole tensor, all else of rows or of single values.
    for number, slab in enumerate(_slabs(value, len(value) if quantized and kind == "int16" else None)):
        codes, scale = _converted(slab, kind, quantized)
        if not number:
            nbytes = codes.num_bytes() // len(slab) * len(value)
            if nbytes > MOST_BYTES:
                raise UnsupportedError(
                    f"{path}: the variable {name} would have {nbytes:,} bytes as {codes.dtype}, and CTranslate2's "
                    f"format has room for {MOST_BYTES:,}. Take a smaller type, such as int8."
                )
            file.write(_head(name, tuple(value.shape), codes.dtype, nbytes))
        file.write(codes.to_bytes())
        if scale is not None:
            scales.append(scale)
    if not scales:
        return None
    return scales[0] if not scales[0].shape else np.concatenate(scales)


def _converted(slab: Values, kind: str, quantized: bool) -> tuple[Any, np.ndarray | None]:
    """The engine's variable that its own code makes of some rows, and their scale where they become codes."""
    from ctranslate2.specs.common_spec import LayerNormSpec, LinearSpec
    from ctranslate2.specs.model_spec import OPTIONAL, NumpyVariable, PyTorchVariable

    variable = PyTorchVariable(slab) if isinstance(slab, torch.Tensor) else NumpyVariable(slab)
    if not quantized:
        plain = LayerNormSpec(rms_norm=True)
        plain.gamma = variable
        plain.optimize(quantization=kind)
        return plain.gamma, None
    layer = LinearSpec()  # the engine quantizes what has a scale beside it
    layer.weight = variable
    layer.optimize(quantization=kind)
    scale = layer.weight_scale
    return layer.weight, None if scale == OPTIONAL else np.asarray(scale.numpy())


def _head(name: str, shape: tuple[int, ...], dtype: str, nbytes: int) -> bytes:
    return _text(name) + struct.pack(f"<B{len(shape)}IBI", len(shape), *shape, TYPES.index(dtype), nbytes)


def _text(value: str) -> bytes:
    # The engine's own code counts characters; its names are ASCII.
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"
