"""Which engine judges a subject: its engine, version, dtype, device, and the interpreter that has it.

Whatever is missing is told before anything is loaded. An engine whose pins do not fit ours lives in an environment of
its own: quantkit's code runs there on that environment's packages.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass

from quantkit.contracts.engine import Engine
from quantkit.contracts.model import Subject
from quantkit.contracts.registry import find_engine, find_method
from quantkit.errors import DependencyError, RecipeError
from quantkit.system.interpreter import look

SOURCE_ENGINES = ("transformers", "reference")
# What quantkit itself imports in a process that judges, and the packages that bring it.
NEEDED = {
    name: name
    for name in (
        *("numpy", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "huggingface_hub", "pydantic"),
        *("psutil", "rich", "filelock", "platformdirs"),
    )
} | {"yaml": "PyYAML"}


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
