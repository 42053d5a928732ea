"""The registry of methods, formats and engines: one file or folder per entry, imported when it is needed.

`quantkit/methods/NAME.py` defines `METHOD`, `quantkit/formats/NAME.py` (or a folder) `FORMAT`, and
`quantkit/engines/NAME.py` `ENGINE`. NAME is used everywhere: in recipes, on the command line, in the docs, with dashes
for underscores. Names with a leading underscore are shared code.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from quantkit.contracts.engine import Engine
from quantkit.contracts.format import Format
from quantkit.contracts.method import Method
from quantkit.errors import RecipeError, near_miss
from quantkit.system.modules import importing

OPENER = "source"  # formats/source.py opens models and is not a format


@cache
def _names(folder: str) -> tuple[str, ...]:
    package = importlib.import_module(f"quantkit.{folder}")
    return tuple(
        sorted(
            module.name.replace("_", "-")
            for module in pkgutil.iter_modules(package.__path__)
            if not module.name.startswith("_") and module.name != OPENER
        )
    )


@cache
@importing()
def _record(folder: str, attribute: str, name: str) -> Any:
    record = getattr(importlib.import_module(f"quantkit.{folder}.{name.replace('-', '_')}"), attribute)
    if record.name != name:
        raise RuntimeError(f"quantkit/{folder}/{name} has a record named {record.name!r}; the names must agree")
    return record


def _find(kind: str, folder: str, attribute: str, name: str) -> Any:
    # Import only the requested file: an engine's process must not load the other engines.
    known = _names(folder)
    if name not in known:
        raise RecipeError(f"unknown {kind} {name!r}.{near_miss(name, known)} Known: {', '.join(known)}.")
    return _record(folder, attribute, name)


def find_method(name: str) -> Method:
    """Return the method `name`; raises RecipeError for an unknown name and suggests a similar one."""
    return _find("method", "methods", "METHOD", name)


def find_format(name: str) -> Format:
    """Return the format `name`; raises RecipeError for an unknown name and suggests a similar one."""
    return _find("format", "formats", "FORMAT", name)


def formats_for(method: Method, bits: str | None = None) -> list[str]:
    """Return the names of the formats that can store a method's values with these bits, the default first."""
    makes, default = method.kind_of(bits)
    names = [name for name, kind in formats().items() if makes in kind.holds]
    return sorted(names, key=lambda name: name != default)


def find_format_for(method: Method, name: str | None, bits: str | None = None) -> Format:
    """Return the format `name` (None: the method's default); raises RecipeError if it cannot hold the values."""
    if name is None:
        return find_format(method.kind_of(bits)[1])
    known = formats_for(method, bits)
    if name not in known:
        which = f" with bits {bits}" if bits in method.other_kinds else ""
        raise RecipeError(
            f"the method {method.name}{which} cannot be written as {name!r}.{near_miss(name, known)} "
            f"Its formats: {', '.join(known)}.{_who_writes(name)}"
        )
    return find_format(name)


def _who_writes(name: str) -> str:
    """Return a sentence on the methods that write this format, with a command; empty for an unknown format."""
    if name not in formats():
        return ""
    writers = [other for other in methods().values() if other.makes in find_format(name).holds]
    if not writers:
        return f" {name} can only be read as a source."
    own = next((other for other in writers if other.default_format == name), writers[0])
    command = f"quantkit convert MODEL --method {own.name} --bits {own.default_bits}"
    command += f" --format {name}" * (own.default_format != name)
    return f" Methods that write {name}: {', '.join(other.name for other in writers)}, such as {command}"


def find_engine(name: str) -> Engine:
    """Return the engine `name`; raises RecipeError for an unknown name and suggests a similar one."""
    return _find("engine", "engines", "ENGINE", name)


def methods() -> dict[str, Method]:
    """Return all methods by name."""
    return {name: find_method(name) for name in _names("methods")}


def formats() -> dict[str, Format]:
    """Return all formats by name."""
    return {name: find_format(name) for name in _names("formats")}


def engines() -> dict[str, Engine]:
    """Return all engines by name."""
    return {name: find_engine(name) for name in _names("engines")}


def server_of(format_name: str) -> str | None:
    """Return the name of the server that `quantkit serve` starts for a format, or None."""
    servers = (find_engine(name).server for name in find_format(format_name).engines)
    return next(filter(None, servers), None)
