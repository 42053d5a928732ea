"""The registry: methods, formats and engines are what lies in three folders; each file holds one record.

`quantkit/methods/NAME.py` holds `METHOD`, `quantkit/formats/NAME.py` or a folder `FORMAT`, `quantkit/engines/NAME.py`
`ENGINE`. The name of the file or folder is the name everywhere: in recipes, on the command line, in the docs; an
underscore in it is a dash there. What begins with one is shared code.
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

OPENER = "source"  # formats/source.py opens what users name: no format


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
        raise RuntimeError(f"quantkit/{folder}/{name} holds a record named {record.name!r}; the names must agree")
    return record


def _find(kind: str, folder: str, attribute: str, name: str) -> Any:
    # Only the file that is asked for is imported: an engine's process must not carry the other engines.
    known = _names(folder)
    if name not in known:
        raise RecipeError(f"unknown {kind} {name!r}.{near_miss(name, known)} Known: {', '.join(known)}.")
    return _record(folder, attribute, name)


def find_method(name: str) -> Method:
    """Look a method up; raises RecipeError with a near-miss hint."""
    return _find("method", "methods", "METHOD", name)


def find_format(name: str) -> Format:
    """Look a format up; raises RecipeError with a near-miss hint."""
    return _find("format", "formats", "FORMAT", name)


def formats_for(method: Method, bits: str | None = None) -> list[str]:
    """Names of the formats that hold what a method makes with these bits, its default first."""
    makes, default = method.kind_of(bits)
    names = [name for name, kind in formats().items() if makes in kind.holds]
    return sorted(names, key=lambda name: name != default)


def find_format_for(method: Method, name: str | None, bits: str | None = None) -> Format:
    """The format of that name, or the method's default; raises RecipeError for one that does not hold what it makes."""
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
    """Whose format this is, with a command that writes it, as a sentence behind others; empty where it is none."""
    if name not in formats():
        return ""
    writers = [other for other in methods().values() if other.makes in find_format(name).holds]
    if not writers:
        return f" {name} is read as a source only."
    own = next((other for other in writers if other.default_format == name), writers[0])
    command = f"quantkit convert MODEL --method {own.name} --bits {own.default_bits}"
    command += f" --format {name}" * (own.default_format != name)
    return f" Methods that write {name}: {', '.join(other.name for other in writers)}, such as {command}"


def find_engine(name: str) -> Engine:
    """Look an engine up; raises RecipeError with a near-miss hint."""
    return _find("engine", "engines", "ENGINE", name)


def methods() -> dict[str, Method]:
    """All methods by name."""
    return {name: find_method(name) for name in _names("methods")}


def formats() -> dict[str, Format]:
    """All formats by name."""
    return {name: find_format(name) for name in _names("formats")}


def engines() -> dict[str, Engine]:
    """All engines by name."""
    return {name: find_engine(name) for name in _names("engines")}


def server_of(format_name: str) -> str | None:
    """Return the server that `quantkit serve` starts for a format, or None."""
    stored = formats().get(format_name)
    return next(
        (engine.server for name, engine in engines().items() if stored and name in stored.engines and engine.server),
        None,
    )
