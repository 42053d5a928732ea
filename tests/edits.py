"""Changes of files of artifacts, and what is in a folder."""

import json

from safetensors.torch import load_file, save_file

from quantkit.records.artifact import MANIFEST
from quantkit.system.files import sha256_of


def put(*place, value):
    """A change of a JSON value: what is at `place` becomes `value`."""

    def change(values):
        for key in place[:-1]:
            values = values[key]
        values[place[-1]] = value

    return change


def edit_json(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata={"format": "pt"})


def flip(path, place=-1):
    """Change a bit of one byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def rehash(folder):
    """Make the manifest fit the files' bytes again, as someone would who wants to be believed."""

    def change(values):
        for name in values["files"]:
            path = folder / name
            values["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        values["weight_bytes"] = sum(values["files"][name]["bytes"] for name in values["weight_files"])
        values["bits_per_weight"] = 8 * values["weight_bytes"] / values["source"]["parameters"]

    edit_json(folder / MANIFEST, change)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}
