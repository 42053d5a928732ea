"""An artifact read back from its own bytes, tensor by tensor, beside the source that it was made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quantkit.artifact import Artifact, WeightError
from quantkit.checkpoints.rows import Rows, rows_in_memory
from quantkit.contracts.method import Method
from quantkit.errors import ArtifactError
from quantkit.formats.source import Source
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.progress import Progress
from quantkit.system.memory import give_back_freed

if TYPE_CHECKING:
    import torch

    from quantkit.models.skeleton import Skeleton

    Stored = torch.Tensor | GroupedWeight | Rows

# A tensor whose error is as large as itself is not a quantized copy of its source but a bug.
WORST_WEIGHT_ERROR = 1.0
PIECE = 1 << 20  # values that are compared at a time


def check_values(artifact: Artifact, source: Source | None, method: Method, progress: Progress) -> WeightError | None:
    """Read every tensor back from the artifact's bytes: all finite and, where the method keeps values, near the source.

    Raises ArtifactError naming the tensor.
    """
    errors: dict[str, float] = {}
    find = _originals(source)
    give_back_freed()
    with progress.step("reading the artifact back", artifact.manifest.source.parameters) as advance:
        for name, stored in method.read(artifact):
            original = find(name, stored)
            if original is not None and original.shape != stored.shape:
                raise ArtifactError(f"{artifact.folder}: the tensor {name} reads back as {tuple(stored.shape)}")
            size, error = 0.0, 0.0
            for start, value in _pieces(stored):
                if not np.isfinite(value).all():
                    raise ArtifactError(f"{artifact.folder}: the tensor {name} reads back with NaN or infinite values")
                if original is not None and method.keeps_values:
                    want = original.read(start, start + len(value))
                    size += _square(want)
                    error += _square(want - value)
                advance(value.size)
            if original is not None and method.keeps_values:
                errors[name] = math.sqrt(error / (size or 1.0))
    changed = {name: error for name, error in errors.items() if error > 0}
    if not changed:
        return None
    worst = max(changed, key=lambda name: changed[name])
    if changed[worst] >= WORST_WEIGHT_ERROR:
        raise ArtifactError(
            f"{artifact.folder}: the tensor {worst} reads back with a relative error of {changed[worst]:.2f}, so its "
            f"values are lost. Use more bits than {artifact.manifest.recipe.bits}."
        )
    mean = sum(changed.values()) / len(changed)
    return WeightError(mean=round(mean, 6), worst=round(changed[worst], 6), worst_tensor=worst)


def _originals(source: Source | None) -> Callable[[str, Stored], Rows | None]:
    """Give a function (name, what a method's reader yields under it) -> the source's value for it, or None.

    A dense tensor comes as the source stores it; codes of a linear layer are (out, in) as the skeleton has them.
    """
    skeletons: list[Skeleton] = []

    def find(name: str, stored: Stored) -> Rows | None:
        if source is None:
            return None
        if not isinstance(stored, GroupedWeight):
            # Some checkpoints leave out the first part of their names.
            own = next((n for n in (name, name.partition(".")[2]) if n in source.tensors), None)
            return None if own is None else source.in_rows(own)
        from quantkit.models.skeleton import open_skeleton, rows_of

        if not skeletons:
            skeletons.append(open_skeleton(source.config))
        return rows_of(source, skeletons[0], name)

    return find


def _square(values: NDArray[np.float32]) -> float:
    flat = values.reshape(-1).astype(np.float64)  # squares of large float32 values are beyond float32
    return float(np.dot(flat, flat))


def _pieces(stored: Stored) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Cut a tensor into slabs of rows, dense, each with its first row, so that a large one needs little memory."""
    if not isinstance(stored, GroupedWeight):
        rows = stored if isinstance(stored, Rows) else rows_in_memory(stored)
        yield from rows.pieces(PIECE)
        return
    start = 0
    for part in stored.split(max(1, PIECE // max(1, stored.shape[1]))):
        yield start, part.dense().numpy()
        start += part.shape[0]
