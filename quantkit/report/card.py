"""The model card: `README.md` of an artifact, with the front matter that the Hugging Face Hub reads.

It says what was made from what and how to load it; `write_card` puts what was measured into it. The manifest holds its
hash like any other file's, so the two are replaced together. Metadata: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quantkit.artifact import CARD, MANIFEST, Artifact, FileEntry, Manifest, open_artifact
from quantkit.errors import ArtifactError, QuantkitError, SourceError
from quantkit.report.markdown import escaped
from quantkit.report.records import Report
from quantkit.report.table import Table, megabytes
from quantkit.system.files import create, replace_text, sha256_of
from quantkit.untrusted import MOST_YAML, inside, parse_yaml

BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
SHOWN_ENTRIES = 4  # of an option that is a mapping
MOST_INHERITED, LONGEST_INHERITED = 200, 300  # texts in a list, and characters of a text
INHERITED = ("license", "license_name", "license_link", "language")
TRANSFORMERS = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
ids = tokenizer("Hello", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**ids, max_new_tokens=32)[0]))
```
"""
REFERENCE_ONLY = "`quantkit eval-ppl FOLDER` judges it with quantkit's own reader; other engines do not load it."


@dataclass(frozen=True)
class MethodText:
    """What the card says of a method: one line, the paper, and the library that loads its artifacts.

    usage is Markdown: how engines load the artifact in FOLDER. {file} becomes the first weight file's name,
    {transformers} the lines that load a folder with transformers.
    """

    summary: str
    reference: str
    usage: str
    library: str


def front_matter(text: str) -> dict[str, Any]:
    """The YAML between the dashes at the head of a card; empty where there is none, or none that can be read.

    Its values are strings as they stand there: ``no`` is a language, and ``2024-02-30`` need not be a date.
    """
    block = re.match(r"---[^\S\n]*\n(.*?)\n---[^\S\n]*(\n|$)", text, re.DOTALL)
    try:
        values = parse_yaml(block.group(1), "the front matter", SourceError, plain=True) if block else None
    except QuantkitError:
        return {}
    return values if isinstance(values, dict) else {}


def inherited_metadata(folder: Path) -> dict[str, Any]:
    """What a quantized copy takes over from the card of the source in `folder`.

    A card that cannot be read, or that is a link to somewhere else, says nothing; so does a value that is neither a
    short text nor a list of such.
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


def _tags(manifest: Manifest) -> list[str]:
    bits = re.search(r"\d+", manifest.recipe.bits or "")
    return [manifest.recipe.method, *([f"{bits.group()}-bit"] if bits else []), "quantkit"]


def _recipe_rows(manifest: Manifest) -> list[tuple[str, str]]:
    recipe, source = manifest.recipe, manifest.source
    rows = [
        ("source", source.model + (f", revision {source.revision}" if source.revision else "")),
        ("source weights", ", ".join(f"sha256 {v[:12]} ({k})" for k, v in source.hashes.items() if k != "config.json")),
        *(("adapter", f"{adapter.name} ({adapter.kind})") for adapter in source.adapters),
        ("method", recipe.method),
        ("bits", str(recipe.bits)),
        *((name, _shown(value)) for name, value in manifest.options.items()),
        ("seed", str(recipe.seed)),
        ("made with", ", ".join(f"{name} {number}" for name, number in list(manifest.versions.items())[:3])),
    ]
    return rows if manifest.calibration is None else [*rows, ("calibration", manifest.calibration.sentence)]


def _shown(value: object) -> str:
    """An option's value in a cell of the table; of a mapping the first entries."""
    if not isinstance(value, dict):
        return str(value)
    first = ", ".join(f"{key}={item}" for key, item in list(value.items())[:SHOWN_ENTRIES])
    return first if len(value) <= SHOWN_ENTRIES else f"{first}, ... ({len(value)} in all)"


def _result_rows(manifest: Manifest) -> list[tuple[str, str]]:
    rows = [
        ("parameters", f"{manifest.source.parameters:,}"),
        ("weights", megabytes(manifest.weight_bytes)),
        ("bits per weight", f"{manifest.bits_per_weight:.2f}"),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in manifest.tensor_types.items())),
    ]
    if (error := manifest.weight_error) is not None:
        text = f"mean {error.mean:.4f}, worst {error.worst:.4f} ({error.worst_tensor})"
        rows.append(("relative weight error", text))
    return rows


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = ["| | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {escaped(name)} | {escaped(value)} |" for name, value in rows)])


def render(manifest: Manifest, method: MethodText, inherited: dict[str, Any]) -> str:
    """The card of a fresh artifact, not measured yet; `inherited` is metadata of the source's card."""
    metadata: dict[str, Any] = {
        "library_name": method.library,
        "base_model": manifest.source.model,
        "base_model_relation": "quantized",
        "pipeline_tag": "text-generation",
        "tags": _tags(manifest),
        **inherited,
    }
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    usage = (method.usage or REFERENCE_ONLY).replace("{file}", manifest.weight_files[0])
    usage = usage.replace("{transformers}", TRANSFORMERS.strip()).strip()
    parts = [
        f"---\n{head}---\n",
        f"# {escaped(Path(manifest.source.model).name)}, {escaped(manifest.recipe.label)}\n",
        f"{method.summary[0].upper() + method.summary[1:]}. Made by quantkit; `quantkit.json` holds the whole recipe "
        "and the sha256 of every file, and `quantkit verify FOLDER` checks them.\n",
        f"## Load it\n\n`FOLDER` is this folder.\n\n{usage}\n",
        f"## Recipe\n\n{_table(_recipe_rows(manifest))}\n",
        f"Reference: {method.reference}\n",
        f"## Result\n\n{_table(_result_rows(manifest))}\n",
        *([f"## Notes\n\n{chr(10).join(f'- {escaped(note)}' for note in manifest.notes)}\n"] if manifest.notes else []),
        f"## Measured\n\n{_measured('Nothing yet. `quantkit eval-ppl FOLDER --card` fills this in.')}\n",
    ]
    return "\n".join(parts)


def _measured(text: str) -> str:
    return f"{BEGIN}\n{text.strip()}\n{END}"


def write_card(artifact: Artifact, reports: Iterable[Report]) -> Artifact:
    """Put the table of `reports` into the artifact's card and its new hash into the manifest; return it anew.

    Raises ArtifactError where the card is not as it was written, or has no place for the table.
    """
    path = artifact.folder / CARD
    entry = artifact.manifest.files.get(CARD)
    if entry is None or not path.is_file() or sha256_of(path) != entry.sha256:
        raise ArtifactError(f"{path} is not as it was written, so it is left alone. Convert again with --force.")
    old = path.read_text(encoding="utf-8")
    head, begin, rest = old.rpartition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ArtifactError(f"{path} has no lines {BEGIN} and {END} to put the table between. Convert again.")
    text = head + _measured(Table(tuple(reports)).to_markdown()) + tail
    if text == old:
        return artifact
    new = path.with_name(f"{CARD}.new")
    with create(new) as file:
        file.write(text)
    manifest = _with_card(artifact.manifest, new)
    # A process killed between the two leaves the manifest of the new card beside it; `open_artifact` puts it in place.
    replace_text(artifact.folder / MANIFEST, manifest.to_text(), before=lambda: new.replace(path))
    return open_artifact(artifact.folder)


def add_card(folder: Path, manifest: Manifest, method: MethodText, inherited: dict[str, Any]) -> Manifest:
    """Write the card of a fresh artifact into `folder`; return the manifest with its hash. See `render`."""
    path = folder / CARD
    with create(path) as file:
        file.write(render(manifest, method, inherited))
    return _with_card(manifest, path)


def _with_card(manifest: Manifest, path: Path) -> Manifest:
    entry = FileEntry(bytes=path.stat().st_size, sha256=sha256_of(path))
    return manifest.model_copy(update={"files": dict(sorted({**manifest.files, CARD: entry}.items()))})
