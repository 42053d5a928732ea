"""Write a Hugging Face checkpoint folder from a stream of tensors, with one tensor in memory.

Tensors are spooled to disk as they come and merged into shards at the end. With the spool (spool.py) a killed
conversion continues after its last finished block.
Format: https://github.com/huggingface/safetensors#format (bytes of the tensors without holes, header padded).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.safetensors import ITEM_BYTES, TensorInfo
from quantkit.checkpoints.spool import Spool

SHARD_BYTES = 5_000_000_000
NOT_COPIED = ("torch_dtype", "quantization_config", "auto_map")  # of config.json; code is not copied and not named


class Original(Protocol):
    """The source of a checkpoint. `passthrough`: tensors that are copied bit by bit, published names to own names."""

    passthrough: Mapping[str, str]

    @property
    def whole_config(self) -> dict[str, Any]:
        """config.json."""

    def published(self, name: str) -> str:
        """The name of a tensor in the checkpoint."""

    def info(self, name: str) -> TensorInfo:
        """Where a tensor is, and its shape."""

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of some of its rows."""


class CheckpointWriter(Spool):
    """A spool in the folder of a checkpoint; `finish` writes `model.safetensors` or shards with an index.

    A method that works block by block calls `finish_block` after each decoder block, and adds tensors outside the
    blocks after the last one. `finished` blocks of an earlier process that was killed are not added again. `finish`
    adds the tensors that the `original` passes through, and gives all tensors its published names.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES, *, original: Original | None = None) -> None:
        super().__init__(folder)
        self._folder, self._shard_bytes, self._original = folder, shard_bytes, original

    def finish(self) -> None:
        """Write the shards. A spool with finished blocks stays until the artifact is verified."""
        entries = self._entries
        if (original := self._original) is not None:
            entries = {original.published(name): entry for name, entry in entries.items()}
            entries |= {name: original.info(own) for name, own in original.passthrough.items()}
        # Wide types first keeps every tensor aligned; names make the order independent of the walk.
        order = sorted(entries.items(), key=lambda item: (-ITEM_BYTES[item[1].dtype], item[0]))
        shards: list[dict[str, TensorInfo]] = [{}]
        for name, entry in order:
            if shards[-1] and sum(e.nbytes for e in shards[-1].values()) + entry.nbytes > self._shard_bytes:
                shards.append({})
            shards[-1][name] = entry
        if len(shards) == 1:
            self._write_shard("model.safetensors", shards[0])
        else:
            where: dict[str, str] = {}
            for i, shard in enumerate(shards):
                file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
                self._write_shard(file, shard)
                where |= dict.fromkeys(shard, file)
            total = sum(entry.nbytes for _, entry in order)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        if self.finished:
            self.close()
        else:
            self.remove()

    def _write_shard(self, file_name: str, entries: Mapping[str, TensorInfo]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, entry in entries.items():
            offsets = [offset, offset + entry.nbytes]
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
            offset += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (self._folder / file_name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name, entry in entries.items():
                if (original := self._original) is not None and name in original.passthrough:
                    for start, stop in entry.slabs():
                        rows = original.read_rows(original.passthrough[name], start, stop)
                        file.write(np.ascontiguousarray(rows).data)
                else:
                    self.copy(entry, file)


@contextmanager
def open_writer(
    folder: Path, original: Original, dtype: str, quantization: Mapping[str, Any] | None
) -> Iterator[CheckpointWriter]:
    """Yield a writer; on success also write config.json: the original's with its `dtype` and `quantization_config`."""
    writer = CheckpointWriter(folder, original=original)
    try:
        yield writer
        writer.finish()
    finally:
        writer.close()
    values = {key: value for key, value in original.whole_config.items() if key not in NOT_COPIED}
    values["dtype"] = dtype
    if quantization is not None:
        values["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
