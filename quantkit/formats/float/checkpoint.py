"""Plain checkpoints: safetensors of floats beside a config.json, as Hugging Face models are published.

Only headers are read when one is opened. Tensors come one at a time, or as a slab of rows.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.floats import FLOATS, STORED, count_not_finite, to_float32
from quantkit.checkpoints.rows import Rows
from quantkit.checkpoints.safetensors import TensorInfo, read_bytes, read_header, read_values
from quantkit.checkpoints.side_files import copy_side_files
from quantkit.errors import SourceError
from quantkit.models.config import load_tokenizer, open_config
from quantkit.system.files import sha256_of

if TYPE_CHECKING:
    import torch

SLAB_BYTES = 4 << 20  # of a tensor that is read whole, in slabs


@dataclass
class Checkpoint:
    """A checkpoint folder as a Source: `config` (config.json as a dict), `tensors` (headers), and lazy reads."""

    folder: Path
    model: str
    revision: str | None
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    _finite: bool = False

    @property
    def name(self) -> str:
        """What the model is called, without a place: ``demo``, the hub id, or the folder's name."""
        if self.revision is not None or not Path(self.model).expanduser().is_dir():
            return self.model
        return self.folder.resolve().name

    @property
    def architecture(self) -> str:
        """The `model_type` of the configuration, such as ``llama``."""
        return str(self.config.get("model_type", ""))

    @property
    def parameters(self) -> int:
        """Number of stored weights (tied tensors are stored once)."""
        return sum(t.parameters for t in self.tensors.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum((self.folder / name).stat().st_size for name in self.weight_files)

    @property
    def weight_files(self) -> list[str]:
        """Names of the safetensors files."""
        return sorted({t.file for t in self.tensors.values()})

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor in its stored dtype and shape; raises SourceError for an unknown name."""
        info = self._info(name)
        return self._read(info, 0, info.nbytes).reshape(info.shape)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start:stop` of one tensor."""
        info = self._info(name)
        stop = min(stop, info.shape[0])
        row = info.nbytes // max(info.shape[0], 1)
        return self._read(info, start * row, (stop - start) * row).reshape(stop - start, *info.shape[1:])

    def stored(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return rows `start:stop` of a tensor of floats, all of a scalar, as numpy has them (core/floats.py)."""
        info = self._info(name)
        count = info.shape[0] if info.shape else 1
        stop = count if stop is None else min(stop, count)
        row = info.nbytes // max(count, 1)
        data = read_bytes(self.folder / info.file, info, start * row, (stop - start) * row)
        return data.view(STORED[info.dtype]).reshape(stop - start, *info.shape[1:])

    def floats(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """What `stored` returns, in float32."""
        return to_float32(self.stored(name, start, stop), self._info(name).dtype)

    def select_rows(self, name: str, rows: list[int]) -> torch.Tensor:
        """Return the given rows of one tensor, (len(rows), ...), without reading the others."""
        import torch

        info = self._info(name)
        row = info.nbytes // info.shape[0]
        found = torch.cat([self._read(info, i * row, row) for i in rows])
        return found.reshape(len(rows), *info.shape[1:])

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise SourceError(f"{self.model} has no tensor {name}; the checkpoint does not match its config.json")
        return self.tensors[name]

    def _read(self, info: TensorInfo, offset: int, count: int) -> torch.Tensor:
        return read_values(self.folder / info.file, info, offset, count)

    @cached_property
    def settings(self) -> Any:
        """config.json as the configuration of transformers, with its defaults; raises UnsupportedError."""
        return open_config(self.config)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """sha256 of the configuration and of every weight file, by file name."""
        return {name: sha256_of(self.folder / name) for name in ["config.json", *self.weight_files]}

    def refuse_non_finite(self, told: Callable[[str, int], None] = lambda _name, _bytes: None) -> None:
        """Read every float tensor, in slabs of rows, and raise SourceError at the first NaN or infinity.

        A source that has passed is not read again.
        """
        if self._finite:
            return
        for name, info in self.tensors.items():
            if info.dtype not in FLOATS:
                continue
            rows = info.shape[0] if info.shape else 1
            step = max(1, rows * SLAB_BYTES // max(info.nbytes, 1))
            for start in range(0, rows, step):
                if bad := count_not_finite(self.stored(name, start, start + step), info.dtype):
                    raise SourceError(
                        f"{self.model}: the tensor {name} in {info.file} holds {bad} NaN or infinite values. "
                        "The checkpoint is damaged: fetch it again or use another revision."
                    )
            told(name, info.nbytes)
        self._finite = True

    def in_rows(self, name: str) -> Rows:
        """A tensor of floats, each of its rows read when it is asked for."""
        return Rows(self._info(name).shape, partial(self.floats, name))

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
