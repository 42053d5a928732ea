"""One case: a damaged input, the command that meets it, and who judges the result."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.fuzz.mutations import Damage, json_text, raw_bytes

Change = Callable[[Damage, bytes], bytes]


@dataclass
class Attack:
    """A command of the command line, or a call, on a damaged input.

    `judge` says of a result what is wrong with it; None where nobody can.
    """

    arguments: list[str]
    judge: Callable[[], str] | None = None
    call: Callable[[], object] | None = None


@dataclass
class Case:
    """One damaged input in the making: in the folder `here`, out of the sound ones in `bases`.

    `sound` leaves files as they are: then every judge has to find everything right.
    """

    draw: random.Random
    damage: Damage
    here: Path
    bases: Path
    sound: bool = False
    same: bool = False

    def rewrite(self, path: Path, change: Change) -> None:
        """Put damaged bytes into a file."""
        if self.sound:
            return
        old = path.read_bytes() if path.is_file() else b""
        new = change(self.damage, old)
        self.same = new == old
        path.write_bytes(new)

    def say(self, text: str) -> None:
        """Note what was done."""
        self.damage.notes.append(text)


Kind = Callable[[Case], Attack]


def json_or_raw(damage: Damage, data: bytes) -> bytes:
    """A JSON file with changed values, or with damaged bytes."""
    if damage.draw.random() < 0.2:
        return raw_bytes(damage, data)
    return json_text(damage, json.loads(data))
