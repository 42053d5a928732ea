"""The tree of errors a user can meet. Each message says what, where, the value it got, and the fix."""

import difflib
from collections.abc import Iterable


class QuantkitError(Exception):
    """Any error that quantkit explains in one line. The command line prints it and ends with code 1."""


class RecipeError(QuantkitError):
    """A recipe, method name or option that cannot be used as written."""


class SourceError(QuantkitError):
    """A checkpoint that is missing, incomplete, unsafe or broken."""


class UnsupportedError(QuantkitError):
    """A model or shape that the method, engine or format cannot take."""


class ArtifactError(QuantkitError):
    """An artifact that is missing, corrupted or not made by quantkit."""


class OutputError(QuantkitError):
    """An output folder that exists already, or a disk that is too small."""


class ResourceError(QuantkitError):
    """A machine with too little memory for what was asked."""


class TextError(QuantkitError):
    """A text that cannot be found or is too short for what was asked."""


class DependencyError(QuantkitError):
    """An optional package is missing; the message holds the pip line that mends it."""


class EngineError(QuantkitError):
    """A native engine failed, crashed or answered with something unusable."""


class ReportError(QuantkitError):
    """Reports that must not stand in one table, or that cannot be read."""


def near_miss(value: object, known: Iterable[object]) -> str:
    """Return `` Did you mean 'x'?`` where a known name is close to `value`, else an empty string."""
    close = difflib.get_close_matches(str(value).lower(), [str(k).lower() for k in known], n=1, cutoff=0.6)
    if not close:
        return ""
    real = next(k for k in known if str(k).lower() == close[0])
    return f" Did you mean {str(real)!r}?"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a full stop."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def missing_package(package: str, extra: str, error: ImportError) -> DependencyError:
    """Say which extra brings an optional package."""
    return DependencyError(
        f"the package {package} is needed here and cannot be imported ({error}). "
        f"Install it with: pip install 'quantkit[{extra}]'"
    )
