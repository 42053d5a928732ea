"""Plain checkpoints: safetensors of floats beside a config.json, as Hugging Face models are published.

Only headers are read when one is opened. Tensors come one at a time, or as a slab of rows.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.safetensors import TensorInfo, read_bytes, read_header
from quantkit.checkpoints.side_files import copy_side_files
from quantkit.errors import SourceError
from quantkit.models.config import load_tokenizer
from quantkit.models.source import Source


class Checkpoint(Source):
    """A checkpoint folder as a source."""

    def __init__(
        self,
        folder: Path,
        model: str,
        revision: str | None,
        config: dict[str, Any],
        tensors: dict[str, TensorInfo],
    ) -> None:
        self.folder, self.model, self.revision = folder, model, revision
        self.config, self.tensors = config, tensors

    @property
    def name(self) -> str:
        """What the model is called, without a place: ``demo``, the hub id, or the folder's name."""
        if self.revision is not None or not Path(self.model).expanduser().is_dir():
            return self.model
        return self.folder.resolve().name

    @property
    def weight_files(self) -> list[str]:
        """Names of the safetensors files."""
        return sorted({info.file for info in self.tensors.values()})

    @property
    def hashed_files(self) -> list[str]:
        """The configuration and every weight file."""
        return ["config.json", *self.weight_files]

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows of a tensor."""
        info = self.info(name)
        row = info.nbytes // max(info.shape[0] if info.shape else 1, 1)
        return read_bytes(self.folder / info.file, info, start * row, (stop - start) * row)

    def copy_side_files(self, folder: Path) -> None:
        """Copy tokenizer, chat template, generation config and licence where the source has them."""
        copy_side_files(self.folder, folder)

    def tokenizer(self) -> Any:
        """Load the tokenizer with transformers; no remote code."""
        return load_tokenizer(self.folder)


def _shards(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise SourceError(f"{index} is not a valid shard index. Fetch it again.") from None
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise SourceError(f"{index} names the shard {name!r} outside its folder; refused")
            if not (folder / name).is_file():
                raise SourceError(f"{folder} lacks the shard {name} that its index names. Fetch it again.")
        return names
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise SourceError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when loaded. "
            "Use a revision with safetensors, or convert the file in a sandbox with safetensors."
        )
    raise SourceError(f"{folder} holds no model.safetensors. Give a Hugging Face checkpoint folder with safetensors.")


def open_checkpoint(folder: Path, model: str, revision: str | None = None) -> Checkpoint:
    """Open the checkpoint in `folder`, which the user calls `model`; raises SourceError."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise SourceError(f"{folder} has no config.json, so it is not a checkpoint. Give the folder that holds it.")
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except ValueError:
        raise SourceError(f"{config_path} is not valid JSON. Fetch it again.") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise SourceError(f"{config_path} names no model_type. Give the config.json of a causal language model.")
    if (quantization := config.get("quantization_config")) is not None:
        kind = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise SourceError(f"{model} is already quantized ({kind}). Give the unquantized model it was made from.")
    tensors: dict[str, TensorInfo] = {}
    for shard in _shards(folder):
        found = read_header(folder / shard)
        if twice := sorted(found.keys() & tensors.keys()):
            raise SourceError(
                f"{folder} holds the tensor {twice[0]} twice, in {tensors[twice[0]].file} and in {shard}. "
                "Fetch the checkpoint again."
            )
        tensors.update(found)
    return Checkpoint(folder, model, revision, config, tensors)
