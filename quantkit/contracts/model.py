"""Model: an artifact or a source model to evaluate or serve."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from quantkit.checkpoints.side_files import GENERATION
from quantkit.errors import EngineError
from quantkit.models.config import load_tokenizer
from quantkit.models.source import Source
from quantkit.records.artifact import Artifact
from quantkit.records.recipe import ModelRef
from quantkit.records.report import ModelEntry
from quantkit.system.untrusted import read_object, shown

ModelLike: TypeAlias = str | Path | ModelRef | Artifact | Source  # what users may pass as a model
NOT_ITS_FILES = (
    "it reads the model's folder, whose files are of another model or have unknown names. Make a "
    "checkpoint of the model with `quantkit convert MODEL --method float`, with its adapters"
)


@dataclass(frozen=True)
class Model:
    """An artifact or a source model; exactly one of `artifact` and `source` is set."""

    artifact: Artifact | None
    source: Source | None

    @property
    def _source(self) -> Source:
        if self.source is None:
            raise EngineError("a model must be an artifact or a source")
        return self.source

    @property
    def folder(self) -> Path:
        return self.artifact.folder if self.artifact else self._source.folder

    @property
    def format(self) -> str:
        """Return the name of the format in which the model is stored."""
        return self.artifact.manifest.format if self.artifact else self._source.format

    @property
    def name(self) -> str:
        """Return the source model's name (of a folder, its last part) followed by its adapters' names."""
        if self.artifact:
            return self.artifact.manifest.source.name
        return " + ".join([self._source.name, *(adapter.name for adapter in self._source.adapters)])

    @property
    def ref(self) -> ModelRef:
        """Return a reference with which another process can open the model."""
        if self.artifact:
            return ModelRef(model=str(self.artifact.folder.absolute()))
        source = self._source
        return ModelRef(
            model=source.model,
            revision=source.revision,
            adapters=tuple(str(adapter.folder) for adapter in source.adapters),
        )

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.artifact.manifest.source.config) if self.artifact else self._source.config

    @property
    def end_tokens(self) -> frozenset[int]:
        """Return the ids of end-of-text tokens, from the tokenizer, config.json and generation_config.json."""
        own = self.artifact.folder / GENERATION if self.artifact else self._source.side_files().get(GENERATION)
        generation = read_object(own, EngineError, "Fetch it again, or remove it.") if own and own.is_file() else {}
        ends = [self.tokenizer().eos_token_id]
        for value in (self.config.get("eos_token_id"), generation.get("eos_token_id")):
            ends += value if isinstance(value, list) else [value]
        given = [i for i in ends if i is not None]
        for i in given:
            if not isinstance(i, int) or isinstance(i, bool):
                raise EngineError(f"{self.folder}: the end token {shown(i)} is not a token id. Fix eos_token_id.")
        return frozenset(i for i in given if i >= 0)  # some files have -1 for none

    @property
    def dtype(self) -> str:
        """Return the dtype in config.json, which is transformers' default; float32 if config.json has none."""
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32").removeprefix("torch.")

    @property
    def digest(self) -> str:
        """Return a hash that identifies the model's files."""
        if self.artifact:
            return self.artifact.digest
        return hashlib.sha256("".join(self._source.hashes.values()).encode()).hexdigest()

    @property
    def label(self) -> str:
        """Return the model's column title in tables: method and bits, or the source's dtype or format."""
        if self.artifact:
            return self.artifact.label
        if self._source.format != "float":
            return f"{self._source.format} source"
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "source")

    @property
    def weight_files(self) -> list[Path]:
        names = self.artifact.manifest.weight_files if self.artifact else self._source.weight_files
        return [self.folder / name for name in names]

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the source model."""
        return self.artifact.manifest.source.parameters if self.artifact else self._source.parameters

    def entry(self) -> ModelEntry:
        manifest = self.artifact.manifest if self.artifact else None
        return ModelEntry(
            label=self.label,
            name=self.name,
            method=manifest.recipe.method if manifest else None,
            digest=self.digest,
            notes=manifest.all_notes if manifest else (),
        )

    def tokenizer(self) -> Any:
        """Return the Hugging Face tokenizer, for an artifact the one in its folder."""
        return load_tokenizer(self.artifact.folder) if self.artifact else self._source.tokenizer()
