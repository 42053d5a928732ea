"""Model cards: the `README.md` of an artifact, with the front matter that the Hugging Face Hub reads.

The card (template: card.md) describes the artifact and how to load it; `write_card` adds measurements. The manifest
holds the card's hash, so both are replaced together. Metadata: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from quantkit.errors import ArtifactError, QuantkitError, SourceError
from quantkit.records.artifact import CARD, MANIFEST, Artifact, FileEntry, Manifest, WeightError, open_artifact
from quantkit.records.recipe import CalibrationSpec, ConvertRecipe
from quantkit.records.report import Report
from quantkit.report.table import Table, escape_markdown
from quantkit.system.files import create, replace_text, sha256_of
from quantkit.system.sizes import megabytes
from quantkit.system.untrusted import MOST_YAML, inside, parse_yaml

BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
MOST_INHERITED, LONGEST_INHERITED = 200, 300  # texts in a list, and characters of a text
INHERITED = ("license", "license_name", "license_link", "language")


@dataclass(frozen=True)
class MethodText:
    """A method's texts for the card: summary, paper, and the library that loads its artifacts.

    `usage` is Markdown on loading the artifact in FOLDER. {file} becomes the first weight file's name, {transformers}
    the code that loads a folder with transformers.
    """

    summary: str
    reference: str
    usage: str
    library: str


def front_matter(text: str) -> dict[str, Any]:
    """Return the YAML front matter of a card; empty if it is missing or unreadable.

    Scalars stay strings: ``no`` is a language, and ``2024-02-30`` need not be a date.
    """
    block = re.match(r"---[^\S\n]*\n(.*?)\n---[^\S\n]*(\n|$)", text, re.DOTALL)
    try:
        values = parse_yaml(block.group(1), "the front matter", SourceError, plain=True) if block else None
    except QuantkitError:
        return {}
    return values if isinstance(values, dict) else {}


def inherited_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata that an artifact inherits from the model card of the source in `folder`.

    Skipped: unreadable cards, links that leave the folder, and values other than short texts or lists of them.
    """
    card = folder / CARD
    try:
        if not card.is_file() or not inside(folder, card):
            return {}
        with card.open("rb") as file:
            head = file.read(MOST_YAML)
    except OSError:
        return {}
    known = front_matter(head.decode("utf-8", "replace"))
    return {key: known[key] for key in INHERITED if _inheritable(known.get(key))}


def _inheritable(value: object) -> bool:
    texts = value if isinstance(value, list) else [value]
    return 0 < len(texts) <= MOST_INHERITED and all(
        isinstance(text, str) and 0 < len(text) <= LONGEST_INHERITED and text.isprintable() for text in texts
    )


def render(manifest: Manifest, method: MethodText, inherited: dict[str, Any]) -> str:
    """Return a new artifact's card, without measurements; `inherited` is metadata from the source's card."""
    recipe, source = manifest.recipe, manifest.source
    bits = re.search(r"\d+", recipe.bits or "")
    metadata = {
        "library_name": method.library,
        "base_model": source.model,
        "base_model_relation": "quantized",
        "pipeline_tag": "text-generation",
        "tags": [recipe.method, *([f"{bits.group()}-bit"] if bits else []), "quantkit"],
        **inherited,
    }
    text = (
        templates(escape_markdown, html=False)
        .get_template("card.md")
        .render(
            m=manifest,
            method=method,
            name=Path(source.model).name,
            metadata=Markup(yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)),
        )
    )
    return f"{text}{_measured('Nothing yet. `quantkit eval-ppl FOLDER --card` fills this in.')}\n"


def templates(shown: Callable[[str], str], html: bool) -> Environment:
    """Return this folder's jinja environment: `shown` filters values except Markup, and unknown names are errors."""
    made = Environment(
        loader=PackageLoader("quantkit", "report"),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else shown(str(value)),
    )
    functions = (convert_command, counts, first_versions, megabytes, operand, shell_words, weight_error)
    made.globals |= {function.__name__: function for function in functions}
    return made


def counts(tensor_types: Mapping[str, int]) -> str:
    """List an artifact's tensor types, each with its number of tensors."""
    return ", ".join(f"{count} {kind}" for kind, count in tensor_types.items())


def first_versions(versions: Mapping[str, str]) -> str:
    """List the versions of the main packages."""
    return ", ".join(f"{name} {number}" for name, number in list(versions.items())[:3])


def weight_error(error: WeightError) -> str:
    """Describe the weights' relative error."""
    return f"mean {error.mean:.4f}, worst {error.worst:.4f} ({error.worst_tensor})"


def convert_command(recipe: ConvertRecipe, folder: str) -> str:
    """Return the command that makes an artifact of `recipe` in `folder`, omitting default values."""
    options: list[tuple[str, object]] = [("method", recipe.method), ("bits", recipe.bits), ("format", recipe.format)]
    options += [*sorted(recipe.options.items()), *(("adapter", adapter) for adapter in recipe.adapters)]
    default = CalibrationSpec()
    options += [(f"calibration_{k}", value) for k, value in recipe.calibration if value != getattr(default, k)]
    options += [("revision", recipe.revision), ("seed", recipe.seed or None)]
    words = []
    for name, value in options:
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)]
    return shell_words("convert", operand(recipe.model), *words, "--out", folder)


def operand(text: str) -> str:
    """Return `text` in a form that the command line cannot mistake for an option."""
    return f"./{text}" if text.startswith("-") else text


def shell_words(command: str, *arguments: str) -> str:
    """Return a quantkit command, quoted for a shell."""
    return shlex.join(["quantkit", command, *arguments])


def _measured(text: str) -> str:
    return f"{BEGIN}\n{text.strip()}\n{END}"


def write_card(artifact: Artifact, reports: Iterable[Report]) -> Artifact:
    """Write the table of `reports` into the card and the card's new hash into the manifest; return the artifact.

    Raises ArtifactError if the card was edited, or has no place for the table.
    """
    path = artifact.folder / CARD
    entry = artifact.manifest.files.get(CARD)
    if entry is None or not path.is_file() or sha256_of(path) != entry.sha256:
        raise ArtifactError(f"{path} was edited, so quantkit leaves it unchanged. Convert again with --force.")
    old = path.read_text(encoding="utf-8")
    head, begin, rest = old.rpartition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ArtifactError(f"{path} lacks the lines {BEGIN} and {END} around the table. Convert again.")
    text = head + _measured(Table(tuple(reports)).to_markdown()) + tail
    if text == old:
        return artifact
    new = path.with_name(f"{CARD}.new")
    with create(new) as file:
        file.write(text)
    manifest = _with_card(artifact.manifest, new)
    # A process killed between the two leaves the new card's manifest as a .new file; `open_artifact` renames it.
    replace_text(artifact.folder / MANIFEST, manifest.to_text(), before=lambda: new.replace(path))
    return open_artifact(artifact.folder)


def add_card(folder: Path, manifest: Manifest, method: MethodText, inherited: dict[str, Any]) -> Manifest:
    """Write a new artifact's card into `folder`; return the manifest with the card's hash. See `render`."""
    path = folder / CARD
    with create(path) as file:
        file.write(render(manifest, method, inherited))
    return _with_card(manifest, path)


def _with_card(manifest: Manifest, path: Path) -> Manifest:
    entry = FileEntry(bytes=path.stat().st_size, sha256=sha256_of(path))
    return manifest.model_copy(update={"files": dict(sorted({**manifest.files, CARD: entry}.items()))})
