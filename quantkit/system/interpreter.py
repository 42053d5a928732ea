"""Another Python interpreter: what it has installed, and how quantkit's own code is lent to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import quantkit
from quantkit.errors import DependencyError
from quantkit.system.modules import lacks, version_of

LOOK_LIMIT = 120.0  # seconds


def look(python: str, modules: tuple[str, ...]) -> tuple[list[str], str | None]:
    """Those of `modules` that an interpreter lacks, and the version of the first; raises DependencyError."""
    if python == sys.executable:
        missing = lacks(modules)
        return missing, None if modules[0] in missing else version_of(modules[0])
    path = Path(__file__).with_name("look.py")
    try:
        done = subprocess.run(
            [python, "-P", str(path), *modules], capture_output=True, text=True, timeout=LOOK_LIMIT, check=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )  # fmt: skip
        said = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise DependencyError(f"the interpreter {python} (Python 3.11 or later) cannot be run: {error}") from None
    return said["lacks"], said["version"]


def lent_code(folder: Path) -> str:
    """Make `folder` one that brings this quantkit, and nothing else, to another interpreter; its PYTHONPATH."""
    facts = folder / f"quantkit-{quantkit.__version__}.dist-info" / "METADATA"
    facts.parent.mkdir(parents=True)
    facts.write_text(f"Metadata-Version: 2.1\nName: quantkit\nVersion: {quantkit.__version__}\n", encoding="utf-8")
    (folder / "quantkit").symlink_to(Path(__file__).parent, target_is_directory=True)
    return str(folder)
