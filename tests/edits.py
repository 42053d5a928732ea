"""Changes of files of artifacts, and what is in a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def put(*place: Any, value: Any) -> Callable[[Any], None]:
    """A change of a JSON value: what is at `place` becomes `value`."""

    def change(values: Any) -> None:
        for key in place[:-1]:
            values = values[key]
        values[place[-1]] = value

    return change


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
