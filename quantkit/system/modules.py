"""Modules: importing large ones sooner; what an interpreter lacks of them, and the version of one.

The interpreter is ours, or another that runs this file alone:

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
    """Where large modules are imported: nobody looks for garbage meanwhile.

    They make hundred thousands of objects that stay, and looking for garbage among them is a sixth of the time that
    torch and transformers take. Also a decorator.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def lacks(modules: tuple[str, ...]) -> list[str]:
    """Those of `modules` that cannot be found; none is imported."""
    return [name for name in modules if find_spec(name) is None]


@cache
def version_of(module: str) -> str | None:
    """The version of the installed package that brings `module`, whatever the package is called."""
    with suppress(PackageNotFoundError):
        return version(module)
    packages = packages_distributions().get(module)  # reads what every package installed
    return version(packages[0]) if packages else None


if __name__ == "__main__":
    json.dump({"lacks": lacks(tuple(sys.argv[1:])), "version": version_of(sys.argv[1])}, sys.stdout)
