"""Write a Hugging Face checkpoint folder from a stream of tensors, in bounded memory.

Tensors are spooled to disk as they come and merged into shards at the end, so that only one tensor is in memory.
The spool (spool.py) also lets a conversion that was killed go on after its last finished block.
Format: https://github.com/huggingface/safetensors#format (bytes of the tensors without holes, header padded).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.checkpoints.spool import DTYPE_NAMES, Spool, Spooled

SHARD_BYTES = 5_000_000_000


class CheckpointWriter(Spool):
    """A spool in the folder of a checkpoint; `finish` writes `model.safetensors` or shards with an index.

    A method that works block by block calls `finish_block` after each decoder block. Where an earlier process was
    killed, `finished` blocks are there already: `names` and `get` give their tensors, and they are not added again.
    Tensors outside the blocks are added after the last one.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        super().__init__(folder)
        self._folder, self._shard_bytes = folder, shard_bytes

    def finish(self) -> None:
        """Write the shards. The spool stays while it holds finished blocks, until the artifact is proven."""
        # Wide types first keeps every tensor aligned; names make the order independent of the walk.
        order = sorted(self.entries(), key=lambda e: (-e.dtype.itemsize, e.name))
        shards: list[list[Spooled]] = [[]]
        for entry in order:
            if shards[-1] and sum(e.nbytes for e in shards[-1]) + entry.nbytes > self._shard_bytes:
                shards.append([])
            shards[-1].append(entry)
        if len(shards) == 1:
            self._write_shard("model.safetensors", shards[0])
        else:
            where: dict[str, str] = {}
            for i, shard in enumerate(shards):
                name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
                self._write_shard(name, shard)
                where.update({entry.name: name for entry in shard})
            total = sum(entry.nbytes for entry in order)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        if self.finished:
            self.close()
        else:
            self.remove()

    def _write_shard(self, name: str, entries: list[Spooled]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in entries:
            header[entry.name] = {
                "dtype": DTYPE_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [offset, offset + entry.nbytes],
            }
            offset += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (self._folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for entry in entries:
                self.copy(entry, file)


@contextmanager
def open_writer(
    folder: Path, config: Mapping[str, Any], dtype: str, quantization: Mapping[str, Any] | None
) -> Iterator[CheckpointWriter]:
    """Yield a writer; on success also write config.json: `config` with its `dtype` and `quantization_config`."""
    writer = CheckpointWriter(folder)
    try:
        yield writer
        writer.finish()
    finally:
        writer.close()
    values = {key: value for key, value in config.items() if key not in ("torch_dtype", "quantization_config")}
    values["dtype"] = dtype
    if quantization is not None:
        values["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
