"""Opens whatever a user calls a model: ``demo``, a checkpoint folder, a GGUF file, a hub id; and artifacts."""

from __future__ import annotations

from pathlib import Path

from quantkit.artifact import MANIFEST, Artifact, open_artifact
from quantkit.checkpoints.side_files import SIDE_FILES
from quantkit.contracts.model import Model
from quantkit.errors import ArtifactError, SourceError, reason_of
from quantkit.formats.float.checkpoint import open_checkpoint
from quantkit.formats.gguf import FORMAT as GGUF
from quantkit.formats.quantized_checkpoint import open_folder
from quantkit.models.source import Source
from quantkit.untrusted import path_of

HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "config.json", "README.md", *SIDE_FILES]


def open_source(model: str, revision: str | None = None) -> Source:
    """Open `model`: ``demo``, a local checkpoint folder, quantized or not, a GGUF file, or a Hugging Face hub id.

    Raises SourceError; for a GGUF file also what formats/gguf/checkpoint.py raises.
    """
    if model == "demo":
        from quantkit.data.demo import demo_folder

        return open_checkpoint(demo_folder(), model, None)
    folder = path_of(model, SourceError)
    if folder.is_dir():
        return open_folder(folder, model, None)
    if folder.is_file() and GGUF.recognizes(folder):
        from quantkit.formats.gguf.checkpoint import GgufCheckpoint

        return GgufCheckpoint(folder)
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or folder.exists():
        raise SourceError(f"the folder {model} does not exist. Give a checkpoint folder, a hub id, or 'demo'.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        got = snapshot_download(model, revision=revision, allow_patterns=HUB_PATTERNS)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise SourceError(
            f"{model!r} is no local folder, and the hub did not give it: {reason_of(error)}. "
            "Give a checkpoint folder, a hub id, or 'demo'."
        ) from None
    return open_folder(Path(got), model, Path(got).name)


def open_model(path_or_name: str | Path | Artifact | Source, revision: str | None = None) -> Model:
    """Open an artifact folder, a checkpoint folder, a hub id or ``demo``. Raises ArtifactError or SourceError."""
    if isinstance(path_or_name, Artifact):
        return Model(path_or_name, None)
    if not isinstance(path_or_name, str | Path):
        return Model(None, path_or_name)
    folder = path_of(path_or_name, SourceError)
    if (folder / MANIFEST).is_file():
        return Model(open_artifact(folder), None)
    if folder.is_file():
        fix = "; `quantkit import` makes a checkpoint of a GGUF file" if GGUF.recognizes(folder) else ""
        raise ArtifactError(f"{folder} is a file. Give the artifact's folder, or a model{fix}.")
    return Model(None, open_source(str(path_or_name), revision))
