"""Choose the engine that evaluates a model, with its version, dtype, device, and Python interpreter.

Missing packages are reported before a model is loaded. An engine with conflicting dependencies can have its own
environment; its interpreter then runs quantkit's code with the packages of that environment.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from quantkit.contracts.engine import Engine
from quantkit.contracts.model import NOT_ITS_FILES, Model
from quantkit.contracts.registry import find_engine, find_format
from quantkit.contracts.stored import kv_scales_of
from quantkit.errors import ArtifactError, DependencyError, RecipeError
from quantkit.formats._quantization_config import quantization_of
from quantkit.models.source import Source
from quantkit.records.recipe import EngineSpec, Strict, parse
from quantkit.records.report import EngineEntry
from quantkit.system.device import CPU, device_label, find_device
from quantkit.system.interpreter import inspect_interpreter, refuse_unmet

REFERENCE = "reference"  # quantkit's own engine, which reads every format
BASELINE_DTYPE = "float32"
FP8 = "fp8"  # of `KvCache`
# What quantkit itself imports in a process that evaluates, and the packages with other names than their modules.
NEEDED = (
    *("numpy", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "huggingface_hub", "pydantic"),
    *("psutil", "rich", "filelock", "platformdirs", "yaml"),
)
PACKAGES = {"yaml": "PyYAML"}


class LoadedEntry(Strict):
    """Facts about a loaded model, as its engine's process reports them."""

    dtype: str
    device: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ChosenEngine:
    """A chosen engine: its version, interpreter, device, dtype and further settings."""

    name: str
    version: str  # installed for the interpreter `python`
    dtype: str | None
    python: str
    device: str  # with another interpreter than ours: `asked_device`
    asked_device: str
    walk: bool = False  # it computes block by block
    offload_bytes: int = 0  # in a walk, more bytes of hidden states go to a file
    named: bool = False  # the user asked for this engine
    kv_cache: str | None = None  # type of the cached keys and values; None: the engine's own
    notes: tuple[str, ...] = ()

    @property
    def variables(self) -> list[str]:
        """Return NAME=VALUE of each environment variable that is set and changes the engine's results."""
        prefixes = find_engine(self.name).variables
        return sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(prefixes))

    def entry(self, loaded: LoadedEntry) -> EngineEntry:
        return EngineEntry(
            name=self.name,
            version=self.version,
            dtype=loaded.dtype,
            device=device_label(loaded.device),
            kv_cache=self.kv_cache,
            notes=(*self.notes, *loaded.notes),
        )


def refusal(engine: Engine, model: Model) -> str | None:
    """Return why an engine cannot open a model, or None if it can."""
    stored = find_format(model.format)
    takes_values = engine.name == REFERENCE or stored.loaded_by(engine.name).values
    if model.source is not None and not model.source.own_files and not takes_values:
        return f"{NOT_ITS_FILES}, or take --engine {REFERENCE}"
    if reason := stored.refusals(quantization_of(model.folder)).get(engine.name):
        return reason
    return None if engine.name in stored.engines else engine.opens


def choose(model: Model, engine: str | EngineSpec | None = None) -> ChosenEngine:
    """Return the engine for a model: the requested one, or else the first of the model's format.

    Raises RecipeError or EngineError if the engine refuses the model or device, DependencyError if it is missing.
    """
    spec = engine if isinstance(engine, EngineSpec) else parse(EngineSpec, {"engine": engine}, "engine")
    found = find_engine(spec.engine or find_format(model.format).engines[0])
    if reason := refusal(found, model):
        raise RecipeError(f"the engine {found.name} cannot open {model.label}: {reason}")
    python = spec.python or sys.executable
    version = require(found, python)
    plugins = find_format(model.format).loaded_by(found.name).plugins
    refuse_unmet(python, plugins, f"the engine {found.name} with files in the format {model.format}")
    found.refuse(spec.dtype)
    if spec.kv_cache not in (None, *found.kv_caches):
        known = " or ".join(found.kv_caches) or "the one that the engine chooses"
        raise RecipeError(
            f"the engine {found.name} has no key-value cache of type {spec.kv_cache}, only {known}. Leave --kv-cache "
            "out, or give another --engine."
        )
    kv_cache, notes = _cache(model, found, spec.kv_cache)
    device = spec.device
    if python == sys.executable:  # the device of another interpreter is known once the engine is loaded there
        try:
            device = found.find_device(spec.device)
        except RecipeError as error:
            raise RecipeError(f"--device {spec.device} for the engine {found.name}: {error}") from None
    found.refuse_model(model, spec.dtype, device)
    named = spec.engine is not None
    return ChosenEngine(
        found.name, version, spec.dtype, python, device, spec.device, named=named, kv_cache=kv_cache, notes=notes
    )


def _cache(model: Model, engine: Engine, asked: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Return the type of the cached keys and values, and a note on their scales; raise ArtifactError."""
    rounds = find_format(model.format).loaded_by(engine.name).rounds_cache
    try:
        scales = kv_scales_of(model)
    except ArtifactError as error:
        if asked == FP8:
            raise
        return asked, (f"{'figures include' if rounds else 'no figure includes'} its key-value cache: {error}",)
    if asked == FP8 or (rounds and asked is None and scales is not None):
        return FP8, (f"cached keys and values have {'the scales in its files' if scales else 'scales of 1'}",)
    if scales is None or asked is not None:
        return asked, ()
    return asked, ("its config.json asks for an FP8 key-value cache: --kv-cache fp8 includes what that costs",)


def choose_for_baseline(source: Source, asked_device: str) -> ChosenEngine:
    """Return the engine that computes a source's baseline: in torch, in this interpreter."""
    loading = find_format(source.format).loading
    name = next((name for name, how in loading.items() if how.values), REFERENCE)
    version, device = require(find_engine(name)), own_device(asked_device)
    return ChosenEngine(name, version, BASELINE_DTYPE, sys.executable, device, asked_device)


def own_device(asked: str) -> str:
    """Return the torch device for the requested one; the CPU if torch does not have it."""
    try:
        return find_device(asked)
    except RecipeError:
        return CPU


def require(engine: Engine, python: str = sys.executable) -> str:
    """Return the engine's version in the interpreter `python`; raises DependencyError if a package is missing."""
    own = python == sys.executable
    missing, version = inspect_interpreter(python, (engine.module,) if own else (engine.module, *NEEDED))
    if engine.module in missing:
        place = "" if own else f" for {python}"
        raise DependencyError(
            f"the engine {engine.name} is not installed{place}. {engine.install}, or use the reference engine: "
            f"--engine {REFERENCE}"
        )
    if missing:
        packages = " ".join(PACKAGES.get(name, name) for name in missing)
        raise DependencyError(
            f"{python} lacks what quantkit needs. Install it with: {python} -m pip install {packages}"
        )
    return version or "unknown"
