"""Reading an artifact's tensors by the names that they have in the evaluated model.

Tensors of a multimodal model get the names of its text half; tensors outside the evaluated model are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.format import Format, KvScales, Layout, Stored, TensorReader
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_format
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.models.text_half import TextPrefixes, is_multimodal, prefixes_of
from quantkit.records.artifact import Artifact
from quantkit.system.untrusted import read_object

AGAIN = "Convert again with --force."


def open_stored(artifact: Artifact, kind: Format) -> TensorReader:
    """Return a reader of an artifact's tensors, without tensors outside the model; raises ArtifactError."""
    manifest, folder = artifact.manifest, artifact.folder
    reader = kind.open(folder, manifest.weight_files, dict(manifest.source.config))
    outside = manifest.source.kept
    config = read_object(folder / "config.json", ArtifactError, AGAIN) if kind.keeps else {}
    if not outside and not is_multimodal(config):
        return reader
    stored, names = StoredTensors(folder, manifest.weight_files), set(reader.names())
    if lacking := sorted(set(outside) - names):
        raise ArtifactError(f"{folder} lacks the tensor {lacking[0]}. {AGAIN}")
    try:
        prefixes = prefixes_of(config, names)
    except UnsupportedError as error:
        raise ArtifactError(f"{folder} cannot be read: {error}") from None
    return NamedReader(reader, prefixes, outside, Counter(map(stored.dtype, outside)))


def kv_scales_of(model: Model) -> KvScales | None:
    """Return the scales of an FP8 key-value cache in a model's files (see `Format`), or None; raises ArtifactError."""
    read = find_format(model.format).kv_scales
    return None if read is None else read(model.folder, tuple(path.name for path in model.weight_files))


def stored_values(reader: TensorReader) -> Iterator[tuple[str, Stored]]:
    """Yield (name, value) of every tensor, one at a time."""
    return ((name, reader.read(name)) for name in reader.names())


class NamedReader:
    """A reader that maps the published names of another `reader` to the names in the evaluated model.

    `prefixes`: name prefixes of a multimodal model's text half, else None. `outside`: tensors to leave out; `types`:
    their number by stored type.
    """

    def __init__(
        self,
        reader: Any,
        prefixes: TextPrefixes | None,
        outside: Collection[str],
        types: Mapping[str, int] | None = None,
    ) -> None:
        self._reader, self._prefixes, self._kept_types = reader, prefixes, types or {}
        self._published = {self._own(name): name for name in reader.names() if name not in outside}

    def _own(self, name: str) -> str:
        return name if self._prefixes is None else self._prefixes.text(name) or name

    def names(self) -> list[str]:
        return sorted(self._published)

    def read(self, name: str) -> Stored:
        stored: Stored = self._reader.read(self._published[name])
        return stored

    def types(self) -> Mapping[str, int]:
        """Return the number of tensors by stored type, without tensors outside the model."""
        return Counter(self._reader.types()) - Counter(self._kept_types)

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape (N, K) of a quantized layer; None for a dense tensor."""
        shape: tuple[int, ...] | None = self._reader.quantized_shape(self._published[name])
        return shape

    def quantization(self) -> str:
        return str(self._reader.quantization())

    def layout(self) -> Layout:
        layout: Layout = self._reader.layout()
        return layout
