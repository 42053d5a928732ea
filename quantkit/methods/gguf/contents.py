"""What is in a GGUF file: keys, tensors, and how many weights each type holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from quantkit.errors import ArtifactError

SHOWN_ITEMS = 3  # of a list among the keys


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: shape (rows, columns), rows last first as numpy has it, and its bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def weights(self) -> int:
        """Number of values."""
        return prod(self.shape)


@dataclass(frozen=True)
class Share:
    """All tensors of one type together."""

    tensors: int
    weights: int
    nbytes: int


@dataclass(frozen=True)
class Contents:
    """A file's keys, lists cut to what fits on a screen, and its tensors in the order of the file."""

    keys: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def bits_per_weight(self) -> float:
        """Of all tensors together."""
        return 8 * sum(t.nbytes for t in self.tensors) / max(1, sum(t.weights for t in self.tensors))

    def shares(self) -> dict[str, Share]:
        """By type, the one with the most weights first."""
        found: dict[str, Share] = {}
        for t in self.tensors:
            before = found.get(t.type, Share(0, 0, 0))
            found[t.type] = Share(before.tensors + 1, before.weights + t.weights, before.nbytes + t.nbytes)
        return dict(sorted(found.items(), key=lambda item: -item[1].weights))

    def to_values(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "keys": self.keys,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "types": {name: vars(share) for name, share in self.shares().items()},
            "tensors": [vars(t) for t in self.tensors],
        }


def contents_of(path: Path) -> Contents:
    """Read keys and tensor list of `path`, or of the one GGUF file in that folder; raises ArtifactError."""
    from gguf import GGUFReader

    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(files) != 1:
        raise ArtifactError(f"{path} holds {len(files)} GGUF files. Give one file.")
    try:
        reader = GGUFReader(files[0], "r")
        keys = {name: _value(field) for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        tensors = tuple(
            Tensor(t.name, t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), int(t.n_bytes))
            for t in reader.tensors
        )
    except (ValueError, OSError, KeyError, IndexError) as error:
        raise ArtifactError(f"{files[0]} is no GGUF file that can be read: {error}.") from None
    return Contents(keys, tensors)


def _value(field: Any) -> Any:
    """A key's value; of a long list the first items and its length, as text."""
    if len(field.data) <= SHOWN_ITEMS:
        return field.contents()
    first = ", ".join(str(field.contents(i)) for i in range(SHOWN_ITEMS))
    return f"{first}, ... ({len(field.data)} in all)"
