"""Write a Hugging Face checkpoint folder from a stream of tensors, with one tensor in memory.

Tensors are appended to a file, the spool, and merged into safetensors shards at the end. `tensors.spool` has their
bytes. `tensors.journal` has one line per finished decoder block: JSON with the offsets and the CRC-32 of its tensors
and the state of the work, followed by the line's own CRC-32. A killed process leaves at most an incomplete line and
bytes after the last block. Both are cut off when the spool is opened again, and the conversion resumes after the last
finished block. Format: https://github.com/huggingface/safetensors#format (tensors without gaps, padded header).
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.safetensors import DTYPES, ITEM_BYTES, TensorInfo, to_torch
from quantkit.system.files import sync_folder

if TYPE_CHECKING:
    import torch

SPOOL, JOURNAL = "tensors.spool", "tensors.journal"
CHUNK = 1 << 24  # bytes read at a time
STORED_NAMES = {f"torch.{kind}": name for name, kind in DTYPES.items()}


def line_of(values: dict[str, Any]) -> str:
    """Return a line of the journal: `values` as JSON, followed by the CRC-32 of the JSON text."""
    text = json.dumps(values)
    return f"{text} {zlib.crc32(text.encode()):08x}\n"


def read_journal(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the journal's intact lines whose tensors are in the spool, and the length of these lines in bytes."""
    journal, spool = folder / JOURNAL, folder / SPOOL
    lines: list[dict[str, Any]] = []
    length = 0
    if journal.is_file() and spool.is_file():
        size = spool.stat().st_size
        for text in journal.read_bytes().splitlines(keepends=True):
            line = _parse(text, len(lines), lines[-1]["end"] if lines else 0, size)
            if line is None:
                break
            lines.append(line)
            length += len(text)
    return lines, length


def _parse(text: bytes, block: int, start: int, size: int) -> dict[str, Any] | None:
    """Return the journal line of `block`, whose tensors are between bytes `start` and `size`; None if it is invalid."""
    values, _, crc = text.rpartition(b" ")
    if crc != b"%08x\n" % zlib.crc32(values):
        return None
    try:
        line: dict[str, Any] = json.loads(values)
        end = line["end"]
        sound = line["block"] == block and start <= end <= size and {"crc32", "state"} < line.keys()
        for _, dtype, shape, first in line["tensors"]:
            sound = sound and start <= first <= first + math.prod(shape) * ITEM_BYTES[dtype] <= end
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None
    return line if sound else None


def cut_to_journal(folder: Path) -> list[dict[str, Any]]:
    """Truncate the journal after its last intact line and the spool after its last block; return the lines."""
    lines, length = read_journal(folder)
    for path, end in ((folder / JOURNAL, length), (folder / SPOOL, lines[-1]["end"] if lines else 0)):
        if path.is_file() and path.stat().st_size > end:
            os.truncate(path, end)
    return lines


def restore(folder: Path) -> dict[str, Any] | None:
    """Return the state recorded with the last finished block in `folder`; None if no block is finished.

    If a block's bytes do not have the recorded checksum, it and all later blocks are dropped.
    """
    lines = cut_to_journal(folder)
    start, sound = 0, 0
    for line in lines:
        if _crc32(folder / SPOOL, start, line["end"]) != line["crc32"]:
            break
        start, sound = line["end"], sound + 1
    if sound < len(lines):
        os.truncate(folder / SPOOL, start)
        lines = cut_to_journal(folder)
    return lines[-1]["state"] if lines else None


def _crc32(path: Path, start: int, end: int) -> int:
    crc = 0
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            chunk = file.read(min(end - start, CHUNK))
            crc = zlib.crc32(chunk, crc)
            start += len(chunk)
    return crc


class Spool:
    """Writer of tensors by name; after `finish_block`, all added tensors survive the end of the process.

    `finished` is the number of finished decoder blocks, from the first on.
    """

    def __init__(self, folder: Path) -> None:
        self._spool_path, self._journal_path = folder / SPOOL, folder / JOURNAL
        lines = cut_to_journal(folder)
        self._entries = {
            name: TensorInfo(SPOOL, dtype, tuple(shape), start, math.prod(shape) * ITEM_BYTES[dtype])
            for line in lines
            for name, dtype, shape, start in line["tensors"]
        }
        self._final = set(self._entries)
        self._fresh: dict[str, TensorInfo] = {}
        self._crc = 0
        self.finished = len(lines)
        self._file = self._spool_path.open("r+b" if self._spool_path.exists() else "w+b")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor to disk, unless a finished block already has it."""
        self.add_pieces(name, tensor.dtype, tuple(tensor.shape), (tensor,))

    def add_pieces(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[torch.Tensor]) -> None:
        """Write one tensor as `add` does, from consecutive pieces of its elements."""
        if name in self._final:
            return
        if name in self._entries:
            raise ValueError(f"the tensor {name} was added twice; each tensor of a checkpoint has one name")
        self._entries[name] = self._fresh[name] = self._append(name, dtype, shape, pieces)

    def _append(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[torch.Tensor]
    ) -> TensorInfo:
        import torch

        start, nbytes = self._file.seek(0, os.SEEK_END), math.prod(shape) * dtype.itemsize
        for piece in pieces:
            data = piece.detach().to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
            self._file.write(data)
            self._crc = zlib.crc32(data, self._crc)
        written = self._file.tell() - start
        if written != nbytes:
            raise ValueError(f"the tensor {name} has {written} bytes, but its shape {shape} needs {nbytes}")
        return TensorInfo(SPOOL, STORED_NAMES[str(dtype)], shape, start, nbytes)

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Write a new value of a tensor; if the process is killed before the end, the old value remains."""
        old, dtype = self._entries[name], STORED_NAMES[str(tensor.dtype)]
        if (dtype, tuple(tensor.shape)) != (old.dtype, old.shape):
            raise ValueError(f"the tensor {name} is {old.dtype} {old.shape}; it cannot become {dtype}")
        self._entries[name] = self._append(name, tensor.dtype, old.shape, (tensor,))

    def names(self) -> set[str]:
        return set(self._entries)

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor as it was added; raises KeyError for an unknown name."""
        entry = self._entries[name]
        self._file.seek(entry.start)
        data = np.frombuffer(bytearray(self._file.read(entry.nbytes)), np.uint8)
        return to_torch(data, entry.dtype, entry.shape)

    def copy(self, entry: TensorInfo, file: BinaryIO) -> None:
        self._file.seek(entry.start)
        left = entry.nbytes
        while left:
            left -= file.write(self._file.read(min(left, CHUNK)))

    def finish_block(self, index: int, state: Mapping[str, Any]) -> None:
        """Record on disk that decoder block `index` is finished, with all tensors so far and the `state` (JSON values).

        Raises ValueError if blocks are not finished in order.
        """
        if index != self.finished:
            raise ValueError(f"block {index} cannot be finished: block {self.finished} is next")
        self._file.flush()
        os.fsync(self._file.fileno())
        line = {
            "block": index,
            "end": self._file.seek(0, os.SEEK_END),
            "crc32": self._crc,
            "tensors": [(name, entry.dtype, entry.shape, entry.start) for name, entry in self._fresh.items()],
            "state": dict(state),
        }
        with self._journal_path.open("a", encoding="utf-8") as file:
            file.write(line_of(line))
            file.flush()
            os.fsync(file.fileno())
        if index == 0:
            sync_folder(self._journal_path.parent)  # both files are new in it
        self._final.update(self._fresh)
        self._fresh, self._crc = {}, 0
        self.finished += 1

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        self._journal_path.unlink(missing_ok=True)
        self._spool_path.unlink(missing_ok=True)


SHARD_BYTES = 5_000_000_000
# Keys of config.json; code is neither copied nor named.
NOT_COPIED = ("torch_dtype", "quantization", "quantization_config", "auto_map")


class Original(Protocol):
    """Source of a checkpoint; `passthrough` maps published names of tensors to copy unchanged to the source's names."""

    passthrough: Mapping[str, str]

    @property
    def whole_config(self) -> dict[str, Any]:
        """Return the contents of config.json."""

    def published(self, name: str) -> str:
        """Return the name of a tensor in the published checkpoint."""

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's offset, dtype and shape."""

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the bytes of rows `start:stop` of a tensor, as uint8."""


class CheckpointWriter(Spool):
    """A spool in the folder of a checkpoint; `finish` writes `model.safetensors` or shards with an index.

    A method that works block by block calls `finish_block` after each decoder block, and adds tensors outside the
    blocks after the last one. Blocks that an earlier, killed process finished are not added again. `finish` adds the
    tensors that the `original` passes through, and renames all tensors to their published names.
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
    """Yield a writer; on success also write config.json with the new `dtype` and `quantization_config`."""
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
