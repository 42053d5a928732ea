"""What is in a GGUF file: keys, tensors, and how many weights each type holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import ArtifactError
from quantkit.formats.gguf.header import Header, read_header
from quantkit.system.sizes import bits_per_weight

SHOWN_ITEMS = 3  # of a list among the keys


@dataclass(frozen=True)
class Share:
    """All tensors of one type together."""

    tensors: int
    weights: int
    nbytes: int


class Contents(Header):
    """A file's keys, lists cut to what fits on a screen, and its tensors in the order of the file."""

    @property
    def weights(self) -> int:
        """Of all tensors together."""
        return sum(t.weights for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Of the whole file, as an artifact's manifest has it."""
        return bits_per_weight(self.path.stat().st_size, self.weights)

    @property
    def tensor_bits_per_weight(self) -> float:
        """Of its tensors without keys and tokenizer, which llama.cpp calls BPW."""
        return bits_per_weight(sum(t.nbytes for t in self.tensors), self.weights)

    def shares(self) -> dict[str, Share]:
        """By type, the one with the most weights first."""
        shares: dict[str, Share] = {}
        for t in self.tensors:
            before = shares.get(t.type, Share(0, 0, 0))
            shares[t.type] = Share(before.tensors + 1, before.weights + t.weights, before.nbytes + t.nbytes)
        return dict(sorted(shares.items(), key=lambda item: -item[1].weights))

    def to_values(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "keys": self.keys,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "tensor_bits_per_weight": round(self.tensor_bits_per_weight, 4),
            "types": {name: vars(share) for name, share in self.shares().items()},
            "tensors": [{name: value for name, value in vars(t).items() if name != "start"} for t in self.tensors],
        }


def contents_of(path: Path) -> Contents:
    """Read keys and tensor list of `path`, or of the one GGUF file in that folder; raises ArtifactError."""
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(files) != 1:
        raise ArtifactError(f"{path} holds {len(files)} GGUF files. Give one file.")
    header = read_header(files[0])
    return Contents(files[0], {name: _shown(value) for name, value in header.keys.items()}, header.tensors)


def _shown(value: Any) -> Any:
    """A key's value, as text what JSON has no number for; of a long list the first items and its length."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list) and len(value) <= SHOWN_ITEMS:
        return [_shown(item) for item in value]
    if not isinstance(value, list):
        return value
    return f"{', '.join(map(str, value[:SHOWN_ITEMS]))}, ... ({len(value)} in all)"
