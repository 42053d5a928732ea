"""A model folder written by CTranslate2's own converter, whose faults are mended, from weights read one by one."""

from __future__ import annotations

import copy
import gc
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import UnsupportedError, reason_of
from quantkit.formats.ctranslate2.recorded import Recorder
from quantkit.formats.ctranslate2.writer import write_model_file
from quantkit.models.config import keep_tokenizer
from quantkit.models.skeleton import open_skeleton, set_parameter, source_name
from quantkit.models.source import Source
from quantkit.progress import Progress
from quantkit.system.temporary import temporary_folder


def write_model(source: Source, folder: Path, kind: str, progress: Progress | None = None) -> None:
    """Write model.bin, config.json and vocabulary.json into `folder`, beside the tokenizer; raises UnsupportedError.

    One tensor of the model is in memory at a time.
    """
    _convert(source, folder, kind, progress or Progress())
    tokenizer = source.tokenizer()
    keep_tokenizer(tokenizer, folder)  # config.json is now CTranslate2's own
    mend_settings(folder, tokenizer)


def _convert(source: Source, folder: Path, kind: str, progress: Progress) -> None:
    from ctranslate2.converters import TransformersConverter
    from transformers.utils import logging

    recorder = Recorder()

    class Unread(TransformersConverter):
        """Gives the engine's code a model whose weights are not read yet, and its specification a frugal way to save.

        The converter itself would load all weights, in the configuration's dtype and not in the stored one.
        """

        def load_model(self, _class: Any, _path: str, **_settings: Any) -> Any:
            return _unread_model(source, recorder)

        def specification(self) -> Any:
            spec = self._load()
            spec.validate()
            return spec

    made = folder / "converted"
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # The converter collects garbage after each block: 8.7 s of 10 for the demo model's 30, if everything is looked at.
    gc.freeze()
    try:
        with _folder_of(source) as place:
            spec = Unread(str(place)).specification()
        made.mkdir()
        size = sum(math.prod(variable.shape) for _, variable in spec.variables(ordered=True))
        with progress.step("converting with CTranslate2", size, work=True) as advance:
            spec._serialize = lambda path: write_model_file(Path(path), spec, kind, recorder, advance)
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


@contextmanager
def _folder_of(source: Source) -> Iterator[Path]:
    """Where the converter finds config.json and the tokenizer; it reads no weights itself."""
    with temporary_folder() as folder:
        (folder / "config.json").write_text(json.dumps(source.config), encoding="utf-8")
        source.copy_side_files(folder)
        yield folder


def mend_settings(folder: Path, tokenizer: Any) -> None:
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
