"""Import helpers: faster imports of large modules, and missing modules and versions in any interpreter.

Another interpreter can run this file alone:

PYTHON -P modules.py MODULE [MODULE ...]    # prints {"lacks": [...], "version": "..."}; the version is the first one's
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec


@contextmanager
def importing() -> Iterator[None]:
    """Pause garbage collection while large modules are imported; also usable as a decorator.

    Imports create hundreds of thousands of permanent objects; collecting takes a sixth of torch's and
    transformers' import time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def missing_modules(modules: tuple[str, ...]) -> list[str]:
    """Return the modules that cannot be found, without importing any."""
    return [name for name in modules if find_spec(name) is None]


@cache
def version_of(module: str) -> str | None:
    """Return the version of the installed package that provides `module`, even if its name differs."""
    with suppress(PackageNotFoundError):
        return version(module)
    packages = packages_distributions().get(module)  # reads the file lists of all packages
    return version(packages[0]) if packages else None


if __name__ == "__main__":
    json.dump({"lacks": missing_modules(tuple(sys.argv[1:])), "version": version_of(sys.argv[1])}, sys.stdout)


def leave_torch_out() -> None:
    """Import transformers without torch, unless either is loaded; saves 300 MB. torch can be imported afterwards."""
    if sys.modules.keys() & {"torch", "transformers"}:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # what Python takes for "cannot be imported"
    try:
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]
