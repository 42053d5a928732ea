"""Changes of files of artifacts, and what is in a folder."""

import json

from safetensors.torch import load_file, save_file

from quantkit.artifact import MANIFEST
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


def rehash(path):
    """Make the manifest beside a file fit its bytes."""
    entry = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    edit_json(path.parent / MANIFEST, put("files", path.name, value=entry))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}
