"""Which engine judges a subject: its engine, version, dtype, device, and the interpreter that has it.

Whatever is missing is told before anything is loaded. An engine whose pins do not fit ours lives in an environment of
its own: quantkit's code runs there on that environment's packages.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import quantkit
from quantkit.contracts.model import Subject
from quantkit.contracts.registry import Engine, find_engine, find_method
from quantkit.errors import DependencyError, RecipeError
from quantkit.system.modules import lacks, version_of

SOURCE_ENGINES = ("transformers", "reference")
# What quantkit itself imports in a process that judges, and the packages that bring it.
NEEDED = {
    name: name
    for name in (
        *("numpy", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "huggingface_hub", "pydantic"),
        *("psutil", "rich", "filelock", "platformdirs"),
    )
} | {"yaml": "PyYAML"}
LOOK_LIMIT = 120.0  # seconds


@dataclass(frozen=True)
class EngineSpec:
    """What is asked for: None is the engine that users of the format run, in its own dtype and this interpreter."""

    name: str | None = None
    dtype: str | None = None
    python: str | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class ChosenEngine:
    """What was chosen. `version` is the one installed for the interpreter `python`."""

    name: str
    version: str
    dtype: str | None
    python: str
    device: str

    @property
    def variables(self) -> list[str]:
        """The process variables that change what it computes."""
        prefix = find_engine(self.name).variables
        return sorted(f"{k}={v}" for k, v in os.environ.items() if prefix is not None and k.startswith(prefix))


def choose(subject: Subject, asked: EngineSpec) -> ChosenEngine:
    """The engine for a subject: the asked one, else the method's first.

    Raises RecipeError where it refuses the subject or the device, DependencyError where it is missing.
    """
    name = asked.name or (find_method(subject.method).engines if subject.method else SOURCE_ENGINES)[0]
    engine = find_engine(name)
    if reason := engine.refuses(subject):
        raise RecipeError(f"the engine {name} cannot open {subject.label}: {reason}")
    if re.sub(r":\d+$", ":N", asked.device) not in engine.devices:
        raise RecipeError(f"the engine {name} has no device {asked.device!r}; it has {', '.join(engine.devices)}")
    python = asked.python or sys.executable
    version = require(engine, python)
    # The device of another interpreter's engine shows when it is loaded.
    engine.refuse(asked.dtype, asked.device if python == sys.executable else "cpu")
    return ChosenEngine(name, version, asked.dtype, python, asked.device)


def require(engine: Engine, python: str = sys.executable) -> str:
    """The engine's version in the interpreter `python`; raises DependencyError where something is missing."""
    own = python == sys.executable
    missing, found = look(python, (engine.module,) if own else (engine.module, *NEEDED))
    if engine.module in missing:
        place = "" if own else f" for {python}"
        raise DependencyError(
            f"the engine {engine.name} is not installed{place}. {engine.install}, or judge with our own reader: "
            "--engine reference"
        )
    if missing:
        packages = " ".join(NEEDED[name] for name in missing)
        raise DependencyError(
            f"{python} lacks what quantkit needs. Install it with: {python} -m pip install {packages}"
        )
    return found or "unknown"


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
