"""Run CTranslate2's own converter with one decoder block in memory at a time.

The original loads the whole model, and its `ModelSpec.save` holds all tensors twice. Here it converts the model
without its blocks, then each block alone, in the order of `model.bin`. The converter's own code quantizes
each variable, a few rows at a time, so the file is byte-identical to that of a whole conversion.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from quantkit.errors import UnsupportedError, reason_of
from quantkit.formats.ctranslate2.architectures import readable
from quantkit.formats.ctranslate2.model_file import TYPES, VERSION
from quantkit.models.config import keep_tokenizer
from quantkit.models.skeleton import open_skeleton, set_parameter, source_name
from quantkit.models.source import Source
from quantkit.system.files import temporary_folder
from quantkit.system.progress import Progress

SLAB = 1 << 22  # values quantized at a time
MOST_BYTES = (1 << 32) - 1  # bytes of a variable; its size is stored in 32 bits
Values = torch.Tensor | np.ndarray


def write_model(source: Source, folder: Path, kind: str, progress: Progress | None = None) -> None:
    """Write model.bin, config.json, vocabulary.json and the tokenizer into `folder`; raise UnsupportedError."""
    _convert(source, folder, kind, progress or Progress())
    tokenizer = source.tokenizer()
    keep_tokenizer(tokenizer, folder)  # config.json is now CTranslate2's own
    _fix_settings(folder, tokenizer)


def _convert(source: Source, folder: Path, kind: str, progress: Progress) -> None:
    from ctranslate2.converters.transformers import TransformersConverter
    from transformers.utils import logging

    model = _Model(source)

    class Unread(TransformersConverter):
        """A converter whose model is supplied instead of loaded."""

        def load_model(self, _class: Any, _path: str, **_settings: Any) -> Any:
            return model.outside()

    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # The converter collects garbage after each block: 8.7 of 10 s for the demo model's 30 blocks without the freeze.
    gc.freeze()
    try:
        with temporary_folder() as place:  # a folder with config.json and the tokenizer
            (place / "config.json").write_text(json.dumps(source.config), encoding="utf-8")
            source.copy_side_files(place)
            spec = Unread(str(place))._load()
        spec.validate()
        size = model.block_values + sum(math.prod(v.shape) for v in spec.variables().values() if v.shape)
        with progress.step("converting with CTranslate2", size, work=True) as advance:
            spec._serialize = lambda path: _write_model_file(Path(path), spec, model.variables(spec), kind, advance)
            spec.save(str(folder))
    except (ValueError, NotImplementedError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"CTranslate2's converter cannot convert {source.model} ({source.architecture}): {reason_of(error)}"
        ) from error
    finally:
        gc.unfreeze()
        if shows_bars:
            logging.enable_progress_bar()


class _Model:
    """transformers' model of a source in its stored dtype, with at most one block in memory."""

    def __init__(self, source: Source) -> None:
        stored = {info.dtype for info in source.tensors.values()}
        only = stored.pop() if len(stored) == 1 else ""
        self._dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(only, torch.float32)
        self._source = source
        self._skeleton = open_skeleton(source.config, native=True, settings=copy.deepcopy(source.settings))
        self._model, self._path = self._skeleton.model, self._skeleton.blocks_path
        self._model.config = readable(self._model.config)
        self._blocks = list(self._skeleton.blocks)
        self.block_values = sum(value.numel() for block in self._blocks for value in block.parameters())
        self._kinds = getattr(self._model.config, "layer_types", None)

    def outside(self) -> Any:
        """Return the model with no blocks."""
        self._take([])
        self._read(self._model, "")
        self._model.tie_weights()
        return self._model

    def _take(self, indexes: list[int]) -> None:
        self._model.set_submodule(self._path, nn.ModuleList(self._blocks[index] for index in indexes))
        self._model.config.num_hidden_layers = len(indexes)
        if self._kinds is not None:
            self._model.config.layer_types = [self._kinds[index] for index in indexes]

    def _read(self, module: nn.Module, prefix: str) -> None:
        for name, _ in list(module.named_parameters()):
            stored = source_name(self._source, self._skeleton, prefix + name)
            set_parameter(module, name, self._source.tensor(stored).to(self._dtype))

    def variables(self, spec: Any) -> Iterator[tuple[str, Any, bool]]:
        """Yield (name, variable, whether its codes have scales) in the order of model.bin."""
        outer = dict(spec.variables())
        blocks = {f"decoder/layer_{index}/": index for index in range(len(self._blocks))}
        for name in sorted(outer | blocks):
            if name in blocks:
                yield from self._of_block(name, blocks[name])
            else:
                yield name, outer[name], _has_scales(spec, name)

    def _of_block(self, prefix: str, index: int) -> Iterator[tuple[str, Any, bool]]:
        from ctranslate2.converters.transformers import _MODEL_LOADERS

        self._take([index])
        self._read(self._blocks[index], f"{self._path}.{index}.")
        layer = _MODEL_LOADERS[type(self._model.config).__name__].get_model_spec(self._model).decoder.layer[0]
        self._blocks[index] = nn.Identity()  # the specification has its weights now
        self._take([])
        layer.validate()
        for name, variable in layer.variables(ordered=True):
            yield prefix + name, variable, _has_scales(layer, name)


def _has_scales(spec: Any, name: str) -> bool:
    from ctranslate2.specs.model_spec import index_spec

    scope, _, leaf = name.rpartition("/")
    return hasattr(index_spec(spec, scope), f"{leaf}_scale")


def _fix_settings(folder: Path, tokenizer: Any) -> None:
    """Fix two bugs of the converter's output: null special tokens, and tokens shifted by unused ids."""
    path = folder / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    fixed = {key: "" if value is None and key.endswith("_token") else value for key, value in settings.items()}
    path.write_text(json.dumps(fixed, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    path = folder / "vocabulary.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    places = tokenizer.get_vocab()
    if any(written[place] != token for token, place in places.items()):
        vocabulary = [f"<extra_id_{i}>" for i in range(len(written))]
        for token, place in places.items():
            vocabulary[place] = token
        path.write_text(json.dumps(vocabulary, indent=2), encoding="utf-8")


def _write_model_file(
    path: Path, spec: Any, variables: Iterator[tuple[str, Any, bool]], kind: str, advance: Callable[[int], None]
) -> None:
    """Write the variables to model.bin, quantized to `kind`; equal ones become aliases. Raises UnsupportedError."""
    from ctranslate2.specs.model_spec import SKIP_CREATING_ALIAS

    seen: dict[Any, str] = {}
    aliases: list[tuple[str, str]] = []
    with path.open("wb") as file:
        file.write(struct.pack("<I", VERSION) + _text(spec.name) + struct.pack("<I", spec.revision))
        counted, count = file.tell(), 0
        file.write(struct.pack("<I", 0))
        for name, variable, has_scales in variables:
            value = variable.tensor if hasattr(variable, "tensor") else variable.numpy()
            size = math.prod(variable.shape) if variable.shape else 0
            if variable.shape and name.rpartition("/")[2] not in SKIP_CREATING_ALIAS:
                same = (type(variable), variable.dtype, tuple(variable.shape), _digest(value))
                if seen.setdefault(same, name) != name:
                    aliases.append((name, seen[same]))
                    advance(size)
                    continue
            count += _write_variable(path, file, name, value, kind, has_scales)
            advance(size)
        file.write(struct.pack("<I", len(aliases)))
        for alias, holder in aliases:
            file.write(_text(alias) + _text(holder))
        file.seek(counted)
        file.write(struct.pack("<I", count))


def _slabs(value: Values, rows: int | None = None) -> Iterator[Any]:
    rows = rows or max(1, SLAB // max(1, math.prod(value.shape[1:])))
    return (value[start : start + rows] for start in range(0, len(value), rows))


def _digest(value: Values) -> bytes:
    """Return a hash of the values that treats 0 and -0 as equal."""
    digest = hashlib.sha256()
    for slab in _slabs(value):
        plain = slab + 0
        digest.update(plain.view(torch.uint8).numpy().data if isinstance(plain, torch.Tensor) else plain.tobytes())
    return digest.digest()


def _write_variable(path: Path, file: BinaryIO, name: str, value: Values, kind: str, has_scales: bool) -> int:
    """Quantize and write one variable and its scales; return the number of variables written."""
    if not value.shape:
        _write_array(file, name, np.asarray(value))
        return 1
    scales: list[np.ndarray] = []
    # int16 has one scale per tensor; other types have one per row, or none.
    for number, slab in enumerate(_slabs(value, len(value) if has_scales and kind == "int16" else None)):
        codes, scale = _converted(slab, kind, has_scales)
        if not number:
            nbytes = codes.num_bytes() // len(slab) * len(value)
            if nbytes > MOST_BYTES:
                raise UnsupportedError(
                    f"{path}: the variable {name} would have {nbytes:,} bytes as {codes.dtype}, but CTranslate2's "
                    f"format allows {MOST_BYTES:,}. Use a smaller type, such as int8."
                )
            file.write(_head(name, tuple(value.shape), codes.dtype, nbytes))
        file.write(codes.to_bytes())
        if scale is not None:
            scales.append(scale)
    if not scales:
        return 1
    _write_array(file, f"{name}_scale", np.concatenate(scales) if scales[0].shape else scales[0])
    return 2


def _converted(slab: Values, kind: str, has_scales: bool) -> tuple[Any, np.ndarray | None]:
    """Quantize some rows with the engine's code; return them with their scale, or None if they stay floats."""
    from ctranslate2.specs.common_spec import LayerNormSpec, LinearSpec
    from ctranslate2.specs.model_spec import OPTIONAL, NumpyVariable, PyTorchVariable

    # The engine multiplies float32 in place, and a tied tensor is converted twice: copy.
    variable = PyTorchVariable(slab.clone()) if isinstance(slab, torch.Tensor) else NumpyVariable(slab.copy())
    if not has_scales:
        plain = LayerNormSpec(rms_norm=True)
        plain.gamma = variable
        plain.optimize(quantization=kind)
        return plain.gamma, None
    layer = LinearSpec()  # the engine quantizes variables that have a scale
    layer.weight = variable
    layer.optimize(quantization=kind)
    scale = layer.weight_scale
    return layer.weight, None if scale == OPTIONAL else np.asarray(scale.numpy())


def _write_array(file: BinaryIO, name: str, array: np.ndarray) -> None:
    file.write(_head(name, array.shape, array.dtype.name, array.nbytes) + array.tobytes())


def _head(name: str, shape: tuple[int, ...], dtype: str, nbytes: int) -> bytes:
    return _text(name) + struct.pack(f"<B{len(shape)}IBI", len(shape), *shape, TYPES.index(dtype), nbytes)


def _text(value: str) -> bytes:
    # The engine's own code counts characters, not bytes; its names are ASCII.
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"
