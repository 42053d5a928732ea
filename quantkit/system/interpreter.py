"""Use another Python interpreter: its installed modules, access to quantkit's code, and a hash of that code."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from quantkit.errors import DISTRIBUTION, DependencyError
from quantkit.system import modules

LOOK_LIMIT = 120.0  # seconds
PACKAGE = Path(__file__).parents[1]  # quantkit's own folder
NOT_OF_THE_WORK = "cli"  # subfolder whose code does not affect artifacts


def inspect_interpreter(python: str, names: tuple[str, ...]) -> tuple[list[str], str | None]:
    """Return the modules that an interpreter lacks, and the first module's version; raise DependencyError."""
    if python == sys.executable:
        missing = modules.missing_modules(names)
        return missing, None if names[0] in missing else modules.version_of(names[0])
    try:
        done = subprocess.run(
            [python, "-P", modules.__file__, *names], capture_output=True, text=True, timeout=LOOK_LIMIT, check=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )  # fmt: skip
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise DependencyError(f"the interpreter {python} (Python 3.11 or later) cannot be run: {error}") from None
    return answer["lacks"], answer["version"]


def refuse_unmet(python: str, requirements: tuple[str, ...], what: str) -> None:
    """Raise DependencyError if the interpreter lacks a package, or has an older one than its NAME>=OLDEST asks for."""
    for requirement in requirements:
        name, oldest = requirement.split(">=")
        missing, found = inspect_interpreter(python, (name.replace("-", "_"),))
        if missing or version_numbers(found or "") < version_numbers(oldest):
            # vLLM's CPU wheel has another name: without --no-deps, pip would install vLLM a second time.
            raise DependencyError(
                f"{what} needs {requirement}, and {python} has {'none' if missing else found}. Install it with: "
                f"{python} -m pip install --no-deps {' '.join(map(shlex.quote, requirements))}"
            )


def version_numbers(text: str) -> list[int]:
    """Return the first three numbers of a version, to compare versions."""
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


def lent_code(folder: Path) -> str:
    """Link this quantkit, and nothing else, into `folder` for another interpreter; return the PYTHONPATH to use."""
    number = version(DISTRIBUTION)
    facts = folder / f"{DISTRIBUTION.replace('-', '_')}-{number}.dist-info" / "METADATA"
    facts.parent.mkdir(parents=True)
    facts.write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {number}\n", encoding="utf-8")
    (folder / "quantkit").symlink_to(PACKAGE, target_is_directory=True)
    return str(folder)


def code_digest(package: Path) -> str:
    """Return the sha256 of the package's Python and C code that can affect an artifact's bytes."""
    digest = hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.c") for path in package.rglob(kind)):
        if path.relative_to(package).parts[0] != NOT_OF_THE_WORK:
            digest.update(path.read_bytes())
    return digest.hexdigest()
