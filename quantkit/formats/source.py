"""Open models to read: ``demo``, a checkpoint folder, a GGUF file, a Hugging Face id, or an artifact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.checkpoints.side_files import SIDE_FILES
from quantkit.contracts.model import Model
from quantkit.errors import RecipeError, SourceError, reason_of
from quantkit.formats._quantization_config import FILES as SETTINGS
from quantkit.formats._quantized_checkpoint import open_folder
from quantkit.formats.float import open_checkpoint
from quantkit.formats.gguf import FORMAT as GGUF
from quantkit.models.adapter import base_of, is_adapter, open_adapter
from quantkit.models.source import Source, refuse_another_head
from quantkit.records.artifact import MANIFEST, Artifact, open_artifact
from quantkit.records.recipe import ModelRef
from quantkit.system.untrusted import path_of, shown

FILES = "a .safetensors or .gguf file"
HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "config.json", "README.md", *SIDE_FILES, *SETTINGS]


def open_source(
    model: str | Path | ModelRef, revision: str | None = None, adapters: Sequence[str | Path] = ()
) -> Source:
    """Open ``demo``, a checkpoint folder, a safetensors or GGUF file, a LoRA adapter's folder, or a Hugging Face id.

    `adapters` are LoRA folders, merged in this order; a ModelRef has its own. Raises SourceError, UnsupportedError,
    or ArtifactError for a GGUF file.
    """
    if isinstance(model, ModelRef):
        revision, adapters, model = model.revision, model.adapters, model.model
    model = str(model)
    folder = path_of(model, SourceError)
    if model != "demo" and is_adapter(folder):
        return open_source(_base_of(folder), revision, (folder, *adapters))
    source = _open_base(model, folder, revision)
    refuse_another_head(source)
    if adapters:
        from quantkit.models.adapted import AdaptedSource

        source = AdaptedSource(source, [open_adapter(adapter) for adapter in adapters])
    return source


def _base_of(folder: Path) -> str:
    """Return the local folder of an adapter's base model; raise SourceError if it is not a local folder."""
    base = base_of(folder)
    if base is not None and (path_of(base, SourceError) / "config.json").is_file():
        return base
    named = f"its base model, {shown(base)[1:-1]}, is not a local folder" if base else "it does not name its base model"
    raise SourceError(
        f"{folder} is an adapter, and {named}. Give the base model as MODEL and the adapter with --adapter {folder}."
    )


def _open_base(model: str, folder: Path, revision: str | None) -> Source:
    if revision is not None and (model == "demo" or folder.exists()):
        what = "a model of its own" if model == "demo" else "a folder" if folder.is_dir() else "a file"
        raise SourceError(f"--revision is for models of the hub, but {model} is {what}. Leave --revision out.")
    if model == "demo":
        from quantkit.data.demo import demo_folder

        return open_checkpoint(demo_folder(), model, None)
    if folder.is_dir():
        return open_folder(folder, model, None)
    if folder.is_file() and GGUF.recognizes(folder):
        from quantkit.formats.gguf.checkpoint import GgufCheckpoint

        return GgufCheckpoint(folder)
    if folder.is_file() and folder.suffix == ".safetensors":
        return open_folder(folder.parent, model, None, folder.name)
    if folder.is_file():
        raise SourceError(f"{model} is a file that quantkit cannot read. Give a checkpoint folder, or {FILES}.")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise SourceError(f"the folder {model} does not exist. Give a checkpoint folder, a hub id, or 'demo'.")
    if "@" in model:
        name, _, wanted = model.partition("@")
        raise SourceError(f"{model} is not the name of a model. Give the revision apart: {name} --revision {wanted}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        got = snapshot_download(model, revision=revision, allow_patterns=HUB_PATTERNS)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise SourceError(
            f"{model!r} is not a local folder, and fetching it from the hub failed: {reason_of(error)}. "
            "Give a checkpoint folder, a hub id, or 'demo'."
        ) from None
    return open_folder(Path(got), model, Path(got).name)


def is_artifact(model: str | Path | ModelRef | Artifact | Source) -> bool:
    """Return whether `model` is an Artifact or an artifact's folder."""
    if isinstance(model, str | Path | ModelRef):
        place = model.model if isinstance(model, ModelRef) else model
        return (path_of(place, SourceError) / MANIFEST).is_file()
    return isinstance(model, Artifact)


def open_model(model: str | Path | ModelRef | Artifact | Source) -> Model:
    """Open an artifact's folder or what `open_source` opens; raise ArtifactError, SourceError or RecipeError."""
    if isinstance(model, Artifact):
        return Model(model, None)
    if not isinstance(model, str | Path | ModelRef):
        return Model(None, model)
    if not is_artifact(model):
        return Model(None, open_source(model))
    if isinstance(model, ModelRef):
        if model.adapters:
            raise RecipeError(f"adapters need a source model, but {model.model} is an artifact. Leave them out.")
        if model.revision is not None:
            raise RecipeError(f"--revision is for models of the hub, but {model.model} is an artifact. Leave it out.")
        model = model.model
    return Model(open_artifact(path_of(model, SourceError)), None)
