"""The plan of a file: its tensors in order, each with type, shape and the source's tensor it is made from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.core.ggml import block_type
from quantkit.errors import SourceError, UnsupportedError
from quantkit.methods.gguf import architectures
from quantkit.methods.gguf.architectures import Architecture, Shape
from quantkit.methods.gguf.mix import Choice, Model, choose_types
from quantkit.registry import Job
from quantkit.source import FLOATS, Source

ALIGNMENT = 32
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the file. `shape` is (rows, columns) or (columns,); `heads` is set where rows are
    reordered.

    `source` names the source's tensor, or is None where `values` (columns,) float32 are computed.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    source: str | None
    heads: int | None = None
    values: NDArray[np.float32] | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        return block_type(self.type).row_bytes(self.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file, without padding."""
        return self.rows * self.row_bytes

    def padded(self, kind: str | None = None) -> int:
        """Bytes of the tensor in the file, or of one of type `kind` in its place, padded to the file's alignment."""
        nbytes = self.rows * block_type(kind or self.type).row_bytes(self.shape[-1])
        return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Plan:
    """Everything that is known of a file before a weight is read."""

    architecture: Architecture
    shape: Shape
    tensors: tuple[PlannedTensor, ...]
    choices: dict[str, Choice]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, each padded to the file's alignment."""
        return sum(tensor.padded() for tensor in self.tensors)


def file_name(source: Source, file_type: str) -> str:
    """Name of the file, such as ``SmolLM2-135M-Q4_K_M.gguf``."""
    return f"{model_name(source)}-{file_type}.gguf"


def model_name(source: Source) -> str:
    """The last part of the model's id or folder, with letters, digits and ``._-`` only."""
    last = source.model.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]
    for candidate in (last, source.folder.resolve().name):
        if name := re.sub(r"[^A-Za-z0-9._-]+", "-", candidate).strip("-."):
            return name
    return "model"


def plan_of(job: Job) -> Plan:
    """The plan of a job's file, with the types of single tensors that were asked for or chosen."""
    chosen = job.resolved.get("tensor_type", job.options.tensor_type)
    return make_plan(job.source, job.bits, chosen if isinstance(chosen, dict) else None)


def make_plan(source: Source, file_type: str, asked: Mapping[str, str] | None = None) -> Plan:
    """Plan the file of `source` in `file_type`, from headers only; raises UnsupportedError, SourceError.

    `asked` holds types of single tensors, see `mix.choose_types`.
    """
    architecture = architectures.find_architecture(source)
    shape = architectures.read_shape(source)
    names = _map_names(source, architecture, shape)
    shapes = {name: source.tensors[origin].shape for name, origin in names.items()}
    factors = architectures.rope_factors(shape)
    if factors is not None:
        shapes[ROPE_FACTORS] = factors.shape
    choices = choose_types(shapes.items(), file_type, Model(shape.blocks, shape.heads, shape.kv_heads), asked)
    tensors = tuple(
        PlannedTensor(
            name,
            choice.type,
            shapes[name],
            names.get(name),
            architectures.heads_of(architecture, names[name], shape) if name in names else None,
            factors if name == ROPE_FACTORS else None,
        )
        for name, choice in choices.items()
    )
    return Plan(architecture, shape, tensors, choices)


def _map_names(source: Source, architecture: Architecture, shape: Shape) -> dict[str, str]:
    """Names in the file -> names in the source, after checking names, shapes and dtypes of the source."""
    must, may = architectures.expected_tensors(architecture, shape)
    if missing := [name for name in must if name not in source.tensors]:
        raise SourceError(
            f"{source.model} lacks {len(missing)} tensors that its config.json asks for, such as "
            f"{missing[0]}. Fetch the checkpoint again."
        )
    known = {*must, *may, *([architectures.HEAD] if shape.tied else [])}
    extra = [n for n in source.tensors if n not in known and not n.endswith(architectures.IGNORED)]
    if extra:
        raise UnsupportedError(
            f"{source.model} has {len(extra)} tensors that have no place in a GGUF file of the architecture "
            f"{architecture.name}, such as {extra[0]}"
        )
    table = architectures.name_map(architecture.name, shape.blocks)
    names: dict[str, str] = {}
    for origin in (*must, *(name for name in may if name in source.tensors)):
        name = table.get_name(origin, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UnsupportedError(f"gguf has no name for the tensor {origin} in the architecture {architecture.name}")
        _check_tensor(source, origin, architecture, shape)
        names[name] = origin
    return names


def _check_tensor(source: Source, name: str, architecture: Architecture, shape: Shape) -> None:
    info = source.tensors[name]
    if info.dtype not in FLOATS:
        raise UnsupportedError(f"{source.model}: the tensor {name} has the type {info.dtype}; weights must be floats")
    dimensions = 2 if name.endswith(".weight") and not name.endswith("norm.weight") else 1
    if len(info.shape) != dimensions or 0 in info.shape:
        raise UnsupportedError(f"{source.model}: the tensor {name} has the shape {info.shape}, which is not expected")
    heads = architectures.heads_of(architecture, name, shape)
    if heads and info.shape[0] != heads * shape.head_dim:
        raise UnsupportedError(
            f"{source.model}: the tensor {name} has {info.shape[0]} rows, "
            f"which are not {heads} heads of {shape.head_dim}"
        )
