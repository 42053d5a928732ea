"""A model folder written by CTranslate2's own converter, whose faults are mended: it writes the folder as a whole."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import UnsupportedError, reason_of
from quantkit.models.config import keep_tokenizer
from quantkit.models.skeleton import load_whole
from quantkit.models.source import Source
from quantkit.system.temporary import temporary_folder


def write_model(source: Source, folder: Path, kind: str) -> None:
    """Write model.bin, config.json and vocabulary.json into `folder`, beside the tokenizer; raises UnsupportedError."""
    _convert(source, folder, kind)
    tokenizer = source.tokenizer()
    keep_tokenizer(tokenizer, folder)  # config.json is now CTranslate2's own
    mend_settings(folder, tokenizer)


def _convert(source: Source, folder: Path, kind: str) -> None:
    from ctranslate2.converters import TransformersConverter
    from transformers.utils import logging

    stored = {t.dtype for t in source.tensors.values()}
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(stored.pop() if len(stored) == 1 else "", torch.float32)

    class StoredDtype(TransformersConverter):
        """Loads the weights in their stored dtype; the converter would round them to the configuration's."""

        def load_model(self, model_class: Any, path: str, **settings: Any) -> Any:
            if not source.own_files or source.places is not None:
                return load_whole(source, dtype=dtype)[0]
            return super().load_model(model_class, path, **{**settings, "dtype": dtype})

    made = folder / "converted"
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with _folder_of(source) as place:
            StoredDtype(str(place), low_cpu_mem_usage=True).convert(str(made), quantization=kind)
    except (ValueError, NotImplementedError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"CTranslate2's converter cannot take {source.model} ({source.architecture}): {reason_of(error)}"
        ) from error
    finally:
        if shows_bars:
            logging.enable_progress_bar()
    for path in list(made.iterdir()):
        path.rename(folder / path.name)
    made.rmdir()
    gc.collect()


@contextmanager
def _folder_of(source: Source) -> Iterator[Path]:
    """Where the converter finds config.json, the tokenizer and, of a plain checkpoint, the weights."""
    if source.own_files and source.places is None:
        yield source.folder
        return
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
