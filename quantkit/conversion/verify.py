"""Read an artifact's tensors back from disk and compare them with its manifest.

After a conversion, `check_values` also compares them with the source; `verify` works without the source.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.rows import Rows, rows_in_memory
from quantkit.checkpoints.safetensors import DTYPES, StoredTensors
from quantkit.contracts.check_manifest import open_format, parameters_of, refuse_disagreement, refuse_parameters
from quantkit.contracts.format import Stored
from quantkit.contracts.method import Job
from quantkit.contracts.registry import find_format
from quantkit.contracts.stored import open_stored, stored_values
from quantkit.errors import ArtifactError, RecipeError, UnsupportedError
from quantkit.models.source import Source
from quantkit.numerics.quantized_weight import GroupedWeight, ScaledWeight
from quantkit.records.artifact import MANIFEST, Artifact, WeightError, open_artifact
from quantkit.system.memory import trim_heap
from quantkit.system.progress import Progress

if TYPE_CHECKING:
    from quantkit.models.skeleton import Skeleton

# A tensor with an error as large as its values is a bug, not a quantized copy.
WORST_WEIGHT_ERROR = 1.0
WORST_OF_EIGHT_BITS = 0.25  # some ten times the error of normally distributed values in E4M3, the coarsest type
AGAIN = "Convert again with --force."
PIECE = 1 << 20  # values compared at a time


def check_values(job: Job, artifact: Artifact, progress: Progress) -> WeightError | None:
    """Read every tensor back and return the relative errors to the source; None if no error was found.

    Raises ArtifactError with the tensor's name for values that are not finite, errors as large as the values
    themselves, and contradictions to the manifest.
    """
    refuse_other_kept(job.source, artifact)
    errors = _errors(
        artifact,
        progress,
        lambda name, stored: _original(job, name, stored),
        job.method.weights_comparable(job.options),
        lambda: job.skeleton,
    )
    if not errors:
        return None
    worst = max(errors, key=lambda name: errors[name])
    if errors[worst] >= WORST_WEIGHT_ERROR:
        raise ArtifactError(
            f"{artifact.folder}: the tensor {worst} reads back with a relative error of {errors[worst]:.2f}: its "
            "values are lost. Use gguf BF16, float bfloat16, or another method."
        )
    mean = sum(errors.values()) / len(errors)
    return WeightError(mean=round(mean, 6), worst=round(errors[worst], 6), worst_tensor=worst)


def notes_on_loss(bits: str, error: WeightError | None) -> tuple[str, ...]:
    """Return a note if a tensor lost more than 8-bit types should, such as values too small for float16."""
    width = re.search(r"\d+", bits)
    if error is None or error.worst < WORST_OF_EIGHT_BITS or width is None or int(width[0]) < 8:
        return ()
    return (
        f"{error.worst_tensor} has values that {bits} cannot represent: its relative error is {error.worst:.2f}. "
        "Evaluate the artifact, or use gguf BF16 or float bfloat16",
    )


def verify(path: str | Path | Artifact, progress: Progress | None = None) -> Artifact:
    """Recompute every hash of an artifact, read its tensors back, and compare both with its manifest.

    Raises ArtifactError if they disagree.
    """
    artifact = path if isinstance(path, Artifact) else open_artifact(path)
    artifact.refuse_changed_files()
    read_all(artifact, progress or Progress())
    return artifact


def needs_torch(artifact: Artifact) -> bool:
    """Return whether verifying the artifact needs torch."""
    try:
        return find_format(artifact.manifest.format).refuse_tensors is None
    except RecipeError:
        return True


def read_all(artifact: Artifact, progress: Progress) -> None:
    """Read every tensor of an artifact and compare it with the manifest; raises ArtifactError."""

    def skeleton() -> Skeleton:
        from quantkit.models.skeleton import open_skeleton

        try:
            return open_skeleton(dict(artifact.manifest.source.config))
        except UnsupportedError as error:
            raise ArtifactError(
                f"{artifact.folder / MANIFEST} is corrupted: no model can be built from its source.config: {error}"
            ) from None

    _errors(artifact, progress, lambda _name, _stored: None, False, skeleton)


def _errors(
    artifact: Artifact,
    progress: Progress,
    find: Callable[[str, Stored], Rows | None],
    compare: bool,
    skeleton: Callable[[], Skeleton],
) -> dict[str, float]:
    """Read all tensors and return the nonzero relative errors to the originals that `find` returns, by name."""
    errors: dict[str, float] = {}
    trim_heap()
    kind = open_format(artifact)
    reader = open_stored(artifact, kind)
    refuse_disagreement(artifact, kind, reader)
    by_format = kind.refuse_tensors
    expected = parameters_of(artifact, skeleton()) if by_format is None else None
    shapes: dict[str, tuple[int, ...]] = {}
    with progress.step("reading the artifact back", artifact.manifest.source.parameters) as advance:
        for name, stored in stored_values(reader):
            shapes[name] = tuple(stored.shape)
            if expected is not None:
                expected.take(name, stored)
            original = find(name, stored)
            if original is not None and original.shape != stored.shape:
                raise ArtifactError(f"{artifact.folder}: the tensor {name} reads back as {tuple(stored.shape)}")
            size, error = 0.0, 0.0
            for start, value in _pieces(stored):
                if not np.isfinite(value).all():
                    raise ArtifactError(f"{artifact.folder}: the tensor {name} reads back with NaN or infinite values")
                if original is not None and compare:
                    exact = original.read(start, start + len(value))
                    size += _square(exact)
                    error += _square(exact - value)
                advance(value.size)
            if error > 0:
                errors[name] = math.sqrt(error / (size or 1.0))
    if expected is not None:
        expected.refuse_missing()
    if by_format is not None and (shapes or not artifact.manifest.options.get("vocab_only")):
        by_format(dict(artifact.manifest.source.config), shapes)
    if shapes:
        outside = _values_outside(artifact)
        refuse_parameters(artifact, outside + sum(math.prod(shape) for shape in shapes.values()))
    return errors


def _values_outside(artifact: Artifact) -> int:
    """Return the number of values in the artifact's tensors outside the model."""
    names = artifact.manifest.source.kept
    stored = StoredTensors(artifact.folder, artifact.manifest.weight_files) if names else None
    return sum(math.prod(stored.shape(name)) for name in names) if stored else 0


def refuse_other_kept(source: Source, artifact: Artifact) -> None:
    """Raise ArtifactError if a tensor outside the model is not a byte-for-byte copy of the source's."""
    if not artifact.manifest.source.kept:
        return
    stored = StoredTensors(artifact.folder, artifact.manifest.weight_files)
    for name in artifact.manifest.source.kept:
        own = source.passthrough[name]
        info = source.info(own)
        same = (stored.dtype(name), stored.shape(name)) == (DTYPES[info.dtype], info.shape) and all(
            np.array_equal(stored.read_rows(name, *rows), source.read_rows(own, *rows)) for rows in info.slabs()
        )
        if not same:
            raise ArtifactError(f"{artifact.folder}: the tensor {name} differs from {source.model}'s. {AGAIN}")


def _original(job: Job, name: str, stored: Stored) -> Rows | None:
    """Return the source's values for the stored tensor `name`, or None if the source has no such tensor.

    A dense tensor has the source's shape; the codes of a linear layer have the skeleton's (out, in).
    """
    if not isinstance(stored, GroupedWeight | ScaledWeight):
        # Some checkpoints omit the first part of names.
        own = next((n for n in (name, name.partition(".")[2]) if n in job.source.tensors), None)
        return None if own is None else job.source.in_rows(own)
    from quantkit.models.skeleton import rows_of

    return rows_of(job.source, job.skeleton, name)


def _square(values: NDArray[np.float32]) -> float:
    flat = values.reshape(-1)
    # In float64: squares of large float32 values overflow. Not a library's dot product, which takes all cores.
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64))


def _pieces(stored: Stored) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (first row, dequantized rows) in pieces of about `PIECE` values, to save memory."""
    if not isinstance(stored, GroupedWeight | ScaledWeight):
        rows = stored if isinstance(stored, Rows) else rows_in_memory(stored)
        yield from rows.pieces(PIECE)
        return
    start = 0
    for part in stored.split(max(1, PIECE // max(1, stored.shape[1]))):
        yield start, part.dense().numpy()
        start += part.shape[0]
