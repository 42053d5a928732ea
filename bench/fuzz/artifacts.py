"""Damage to artifacts: to the manifest, and to the files, with hashes that no longer fit and with hashes made anew."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from bench.fuzz import judges
from bench.fuzz.bases import ARTIFACTS, OURS, clean_figures, copied, judged
from bench.fuzz.case import Attack, Case, Kind, json_or_raw
from bench.fuzz.gguf_damage import gguf_bytes
from bench.fuzz.mutations import Damage, json_text, raw_bytes, safetensors_bytes

MANIFEST = "quantkit.json"
MANIFEST_KEYS = (
    "files",
    "weight_files",
    "weight_bytes",
    "tensor_types",
    "format",
    "recipe",
    "source",
    "options",
    "schema_version",
)


def command(case: Case, folder: Path) -> list[str]:
    """What is done with an artifact."""
    verify = ["verify", str(folder)]
    return case.draw.choice((verify, verify, verify, _judged(folder), _judged_by_users(folder)))


def _judged(folder: Path) -> list[str]:
    return judged(folder, "--no-divergence", "--json", "report.json")


def _judged_by_users(folder: Path) -> list[str]:
    """By the engine that users of the format run."""
    return [word for word in _judged(folder) if word not in OURS]


def manifest(case: Case) -> Attack:
    """A changed manifest."""
    name = case.draw.choice(list(ARTIFACTS))
    folder = copied(case.bases / "artifacts" / name, case.here / "artifact")
    before = json.loads((folder / MANIFEST).read_text())

    def change(damage: Damage, data: bytes) -> bytes:
        if damage.draw.random() < 0.1:
            return raw_bytes(damage, data)
        return json_text(damage, json.loads(data), MANIFEST_KEYS)

    case.rewrite(folder / MANIFEST, change)
    case.say(f"artifact {name}")
    arguments = case.draw.choice((["verify", str(folder)], ["inspect", str(folder)], _judged(folder)))
    if arguments[0] == "eval-ppl":
        return Attack(
            arguments, lambda: judges.same_figures(case.here / "report.json", clean_figures(case.bases, name))
        )
    return Attack(arguments, lambda: judges.manifest(before, folder / MANIFEST, arguments[0]))


def changed_file(case: Case) -> Attack:
    """A file whose hash the manifest holds."""
    name = case.draw.choice(list(ARTIFACTS))
    folder = copied(case.bases / "artifacts" / name, case.here / "artifact")
    path = folder / case.draw.choice(sorted(json.loads((folder / MANIFEST).read_text())["files"]))
    kind = case.draw.choice(("bytes", "bytes", "bytes", "bytes", "remove", "folder", "added", "link"))
    case.say(f"{kind} of {path.name} of {name}")
    data = path.read_bytes()
    if kind == "bytes":
        case.rewrite(path, raw_bytes)
    elif kind == "added":
        other = case.draw.choice(("model-2.safetensors", "more.gguf", "modeling.py", "adapter.bin", "tokenizer.model"))
        (folder / other).write_bytes(data)
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(path)
    return Attack(command(case, folder), lambda: f"{path.name} differs from the manifest, and nobody said so")


def rehash(folder: Path) -> None:
    """Let the manifest say what the files are."""
    path = folder / MANIFEST
    values = json.loads(path.read_text())
    for name in values["files"]:
        data = (folder / name).read_bytes()
        values["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    values["weight_bytes"] = sum(values["files"][name]["bytes"] for name in values["weight_files"])
    path.write_text(json.dumps(values, indent=2) + "\n")


def changed_with_hash(case: Case) -> Attack:
    """A damaged file whose hash was made anew, so that the readers meet it."""
    name = case.draw.choice(list(ARTIFACTS))
    sound = case.bases / "artifacts" / name
    folder = copied(sound, case.here / "artifact")
    names = [path.name for path in sorted(folder.iterdir()) if path.name not in (MANIFEST, "README.md", "LICENSE")]
    weights = [file for file in names if file.endswith((".safetensors", ".gguf", ".bin"))]
    file = case.draw.choice(names + weights * 3)
    if file.endswith(".safetensors"):
        case.rewrite(folder / file, safetensors_bytes)
    elif file.endswith(".gguf"):
        case.rewrite(folder / file, gguf_bytes)
    elif file.endswith(".json"):
        case.rewrite(folder / file, json_or_raw)
    else:
        case.rewrite(folder / file, lambda damage, data: raw_bytes(damage, data, 2048))
    rehash(folder)
    case.say(f"{file} of {name}")
    arguments = command(case, folder)
    return Attack(arguments, lambda: judges.artifact(sound, folder, file, arguments[0] == "verify"))


KINDS: dict[str, Kind] = {
    "quantkit.json": manifest,
    "artifact files": changed_file,
    "rehashed files": changed_with_hash,
}
