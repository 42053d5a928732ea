"""The Model that is evaluated or served: an artifact, or a source model itself."""

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

ModelLike: TypeAlias = str | Path | ModelRef | Artifact | Source  # what users name a model by
NOT_ITS_FILES = (
    "it reads the files in the model's folder, which hold another one, or bear other names than it looks for. Make a "
    "checkpoint of the model with `quantkit convert MODEL --method float`, with its adapters"
)


@dataclass(frozen=True)
class Model:
    """Exactly one of `artifact` and `source` is set."""

    artifact: Artifact | None
    source: Source | None

    @property
    def _source(self) -> Source:
        if self.source is None:
            raise EngineError("a model that is neither an artifact nor a source cannot be evaluated")
        return self.source

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.artifact.folder if self.artifact else self._source.folder

    @property
    def format(self) -> str:
        """Name of the format that it is stored in."""
        return self.artifact.manifest.format if self.artifact else self._source.format

    @property
    def name(self) -> str:
        """The source model's name, of a folder only the last part, and those of its adapters."""
        if self.artifact:
            return self.artifact.manifest.source.name
        return " + ".join([self._source.name, *(adapter.name for adapter in self._source.adapters)])

    @property
    def ref(self) -> ModelRef:
        """What another process opens the model by."""
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
        """The source model's config.json."""
        return dict(self.artifact.manifest.source.config) if self.artifact else self._source.config

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids of the tokens that end an answer, by the tokenizer, config.json and generation_config.json."""
        own = self.artifact.folder / GENERATION if self.artifact else self._source.side_files().get(GENERATION)
        generation = read_object(own, EngineError, "Fetch it again, or remove it.") if own and own.is_file() else {}
        ends = [self.tokenizer().eos_token_id]
        for value in (self.config.get("eos_token_id"), generation.get("eos_token_id")):
            ends += value if isinstance(value, list) else [value]
        given = [i for i in ends if i is not None]
        for i in given:
            if not isinstance(i, int) or isinstance(i, bool):
                raise EngineError(f"{self.folder}: the end token {shown(i)} is no token id. Fix eos_token_id.")
        return frozenset(i for i in given if i >= 0)  # some files say -1 for none

    @property
    def dtype(self) -> str:
        """The type in config.json, as transformers uses it by default; float32 if there is none."""
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32").removeprefix("torch.")

    @property
    def digest(self) -> str:
        """Identifies the bytes that are evaluated."""
        if self.artifact:
            return self.artifact.digest
        return hashlib.sha256("".join(self._source.hashes.values()).encode()).hexdigest()

    @property
    def label(self) -> str:
        """Column name: method and bits, or the dtype or the format of the source."""
        if self.artifact:
            return self.artifact.label
        if self._source.format != "float":
            return f"{self._source.format} source"
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "source")

    @property
    def weight_files(self) -> list[Path]:
        """The files that hold weights."""
        names = self.artifact.manifest.weight_files if self.artifact else self._source.weight_files
        return [self.folder / name for name in names]

    @property
    def parameters(self) -> int:
        """Number of weights of the source model."""
        return self.artifact.manifest.source.parameters if self.artifact else self._source.parameters

    def entry(self) -> ModelEntry:
        """The model in a report."""
        manifest = self.artifact.manifest if self.artifact else None
        return ModelEntry(
            label=self.label,
            name=self.name,
            method=manifest.recipe.method if manifest else None,
            digest=self.digest,
            notes=manifest.all_notes if manifest else (),
        )

    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer; an artifact has its own."""
        return load_tokenizer(self.artifact.folder) if self.artifact else self._source.tokenizer()
