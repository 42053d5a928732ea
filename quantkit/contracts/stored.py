"""The tensors of an artifact as the model names them that is judged.

Those of a multimodal model have the names of its text half, and tensors beside the model do not appear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.format import Format, Layout, Stored, TensorReader
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.models.text_half import TextPrefixes, is_multimodal, prefixes_of
from quantkit.records.artifact import Artifact
from quantkit.system.untrusted import read_object

AGAIN = "Convert again with --force."


def open_stored(artifact: Artifact, kind: Format) -> TensorReader:
    """The tensors of an artifact, but for those that are kept beside the model; raises ArtifactError."""
    manifest, folder = artifact.manifest, artifact.folder
    reader = kind.open(folder, manifest.weight_files, dict(manifest.source.config))
    kept = manifest.source.kept
    config = read_object(folder / "config.json", ArtifactError, AGAIN) if kind.keeps else {}
    if not kept and not is_multimodal(config):
        return reader
    stored, names = StoredTensors(folder, manifest.weight_files), set(reader.names())
    if lacking := sorted(set(kept) - names):
        raise ArtifactError(f"{folder} lacks the tensor {lacking[0]}. {AGAIN}")
    try:
        prefixes = prefixes_of(config, names)
    except UnsupportedError as error:
        raise ArtifactError(f"{folder} cannot be read: {error}") from None
    return NamedReader(reader, prefixes, kept, Counter(map(stored.dtype, kept)))


def stored_values(reader: TensorReader) -> Iterator[tuple[str, Stored]]:
    """Every tensor with its name, one at a time."""
    return ((name, reader.read(name)) for name in reader.names())


class NamedReader:
    """`reader` of a format, whose names are published ones. `prefixes` are those of a text half, None for a
    model that is not multimodal; `kept` tensors are outside of it, `types` counts what they are stored as.

    A tensor that is neither goes by its published name.
    """

    def __init__(
        self, reader: Any, prefixes: TextPrefixes | None, kept: Collection[str], types: Mapping[str, int] | None = None
    ) -> None:
        self._reader, self._prefixes, self._kept_types = reader, prefixes, types or {}
        self._published = {self._own(name): name for name in reader.names() if name not in kept}

    def _own(self, name: str) -> str:
        return name if self._prefixes is None else self._prefixes.text(name) or name

    def names(self) -> list[str]:
        """All of them, in order."""
        return sorted(self._published)

    def read(self, name: str) -> Stored:
        """What the reader gives; raises ArtifactError."""
        stored: Stored = self._reader.read(self._published[name])
        return stored

    def types(self) -> Mapping[str, int]:
        """How many tensors are stored as what, but for those beside the model."""
        return Counter(self._reader.types()) - Counter(self._kept_types)

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        """What the reader says; None for a dense tensor."""
        shape: tuple[int, ...] | None = self._reader.quantized_shape(self._published[name])
        return shape

    def quantization(self) -> str:
        """What the reader says."""
        return str(self._reader.quantization())

    def layout(self) -> Layout:
        """What the reader says; raises UnsupportedError."""
        layout: Layout = self._reader.layout()
        return layout
