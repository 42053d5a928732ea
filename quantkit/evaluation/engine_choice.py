"""Which engine judges a model: its engine, version, dtype, device, and the interpreter that has it.

Whatever is missing is said before anything is loaded. An engine whose pins do not fit ours lives in an environment of
its own: quantkit's code runs there on that environment's packages.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from quantkit.contracts.engine import Engine
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine, find_format
from quantkit.errors import DependencyError, RecipeError
from quantkit.evaluation.request import LoadRequest
from quantkit.formats._quantization_config import quantization_of
from quantkit.recipe import EngineSpec
from quantkit.report.records import EngineEntry
from quantkit.system.device import CPU, described, find_device
from quantkit.system.interpreter import look

# What quantkit itself imports in a process that judges, and the packages that bring it.
NEEDED = {
    name: name
    for name in (
        *("numpy", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "huggingface_hub", "pydantic"),
        *("psutil", "rich", "filelock", "platformdirs"),
    )
} | {"yaml": "PyYAML"}


NOT_ITS_FILES = (
    "it reads the files in the model's folder, which hold another one, or bear other names than it looks for. Make a "
    "checkpoint of the model with `quantkit convert MODEL --method float`, with its adapters"
)


@dataclass(frozen=True)
class ChosenEngine:
    """What was chosen. `version` is the one installed for the interpreter `python`. Where that is another one than
    ours, `device` is still what the user asked for.

    `walk`: it computes block by block, with hidden states of more than `offload_bytes` in a file. `named`: the user
    asked for it.
    """

    name: str
    version: str
    dtype: str | None
    python: str
    device: str
    asked_device: str
    walk: bool = False
    offload_bytes: int = 0
    named: bool = False

    @property
    def variables(self) -> list[str]:
        """The process variables that change what it computes."""
        prefixes = find_engine(self.name).variables
        return sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(prefixes))

    def entry(self, loaded: dict[str, Any]) -> EngineEntry:
        """What a report says of the engine; `loaded` is what the process that has it says."""
        device = described(loaded["device"])
        return EngineEntry(**{**loaded, "name": self.name, "version": self.version, "device": device})

    def load_request(self, model: Model, threads: int) -> LoadRequest:
        """What a child process is asked, to open a model in it."""
        return LoadRequest(
            model=model.location, revision=model.source.revision if model.source else None,
            adapters=tuple(str(adapter.folder) for adapter in model.source.adapters) if model.source else (),
            engine=self.name, threads=threads,
            dtype=self.dtype, python=self.python, device=self.device, walk=self.walk,
            offload_bytes=self.offload_bytes,
        )  # fmt: skip


def refusal(engine: Engine, model: Model) -> str | None:
    """The reason why an engine cannot open a model, or None."""
    if model.source is not None and not model.source.own_files:
        takes = engine.reads_values and (model.format == "float" or engine.name == "reference")
        if not takes:
            return f"{NOT_ITS_FILES}, or take --engine reference"
    stored = find_format(model.format)
    if reason := stored.refusals(quantization_of(model.folder)).get(engine.name):
        return reason
    return None if engine.name in stored.engines else engine.opens


def choose(model: Model, spec: EngineSpec) -> ChosenEngine:
    """The engine for a model: the one that is named, else the format's first.

    Raises RecipeError or EngineError where it refuses the model or the device, DependencyError where it is missing.
    """
    name = spec.engine or find_format(model.format).engines[0]
    engine = find_engine(name)
    if reason := refusal(engine, model):
        raise RecipeError(f"the engine {name} cannot open {model.label}: {reason}")
    python = spec.python or sys.executable
    version = require(engine, python)
    engine.refuse(spec.dtype)
    # What the engine of another interpreter computes on shows when it is loaded.
    device = _find_device(engine, spec.device) if python == sys.executable else spec.device
    engine.refuse_model(model, spec.dtype, device)
    return ChosenEngine(name, version, spec.dtype, python, device, spec.device, named=spec.engine is not None)


def _find_device(engine: Engine, asked: str) -> str:
    """The device that an engine computes on in this interpreter; raises RecipeError for one that it does not have."""
    try:
        return engine.find_device(asked)
    except RecipeError as error:
        raise RecipeError(f"--device {asked} for the engine {engine.name}: {error}") from None


def own_device(asked: str) -> str:
    """The device that quantkit computes on in torch when the user asks for `asked`: the CPU where torch lacks that."""
    try:
        return find_device(asked)
    except RecipeError:
        return CPU


def require(engine: Engine, python: str = sys.executable) -> str:
    """The engine's version in the interpreter `python`; raises DependencyError where something is missing."""
    own = python == sys.executable
    missing, version = look(python, (engine.module,) if own else (engine.module, *NEEDED))
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
    return version or "unknown"
