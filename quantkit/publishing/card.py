"""The model card as the hub shows it: the artifact's own, with what is true of it there.

The base model is named as the hub knows it or not at all, and commands say where the folder comes from. The manifest
beside it holds the hash of this card, so what is fetched verifies.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from quantkit.artifact import CARD, Artifact
from quantkit.errors import ArtifactError
from quantkit.report.card import BEGIN, front_matter
from quantkit.report.page.found import convert_command
from quantkit.serving.servers import server_of
from quantkit.untrusted import read_text

HERE = "`FOLDER` is this folder."
NEXT = "\n## Recipe\n"  # the section before which the commands stand
UNMEASURED = f"{BEGIN}\nNothing yet."
MOST_CARD = 1 << 24  # bytes


def hub_card(artifact: Artifact, repo: str, base_model: str | None) -> tuple[str, list[str]]:
    """The card's text for `repo`, and notes for whoever pushes it.

    `base_model` is the source's name on the hub; without one it is the manifest's where that came from the hub.
    Raises ArtifactError for a card that has no head.
    """
    text = read_text(artifact.folder / CARD, ArtifactError, most=MOST_CARD)
    head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    metadata = front_matter(text)
    if head is None or not metadata:
        raise ArtifactError(f"{artifact.folder / CARD} has no head with metadata. Convert again with --force.")
    notes = []
    source = artifact.manifest.source
    known = base_model or (source.model if source.revision is not None else None)
    metadata = _with_base(metadata, known)
    if known is None:
        notes.append(
            f"the card names no base model: {source.model} was a folder here. --base-model gives its name on the hub"
        )
    if UNMEASURED in text:
        notes.append("the card has no figures: quantkit eval-ppl ARTIFACT --card measures and writes them")
    body = text[head.end() :].replace(HERE, f"`hf download {repo} --local-dir FOLDER` fetches it.", 1)
    section = _commands(artifact, repo, known)
    body = body.replace(NEXT, f"\n{section}{NEXT}", 1) if NEXT in body else f"{body.rstrip()}\n\n{section}"
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n{body}", notes


def _with_base(metadata: dict[str, Any], base_model: str | None) -> dict[str, Any]:
    """The metadata with this base model where they named one; without it and the relation to it where it is None."""
    if base_model is None:
        return {key: value for key, value in metadata.items() if key not in ("base_model", "base_model_relation")}
    rest = {key: value for key, value in metadata.items() if key not in ("library_name", "base_model")}
    first = {"library_name": metadata["library_name"]} if "library_name" in metadata else {}
    return {**first, "base_model": base_model, **rest}


def _commands(artifact: Artifact, repo: str, base_model: str | None) -> str:
    recipe = artifact.manifest.recipe
    made = convert_command(recipe if base_model is None else recipe.model_copy(update={"model": base_model}), "FOLDER")
    lines = [
        *([made] if made.isprintable() and "`" not in made else []),
        f"hf download {repo} --local-dir FOLDER",
        "quantkit verify FOLDER",
        "quantkit eval-ppl FOLDER",
        *(["quantkit serve FOLDER"] if server_of(artifact.manifest.format) else []),
    ]
    words = "\n".join(lines)
    return f"## Commands\n\nWhat made it, and what fetches, checks, judges and serves it:\n\n```bash\n{words}\n```\n"
