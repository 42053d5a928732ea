"""The errors that quantkit raises. Each message names the problem, the place and the fix."""

import difflib
import hashlib
import re
from collections.abc import Iterable

DISTRIBUTION = "quantkit-lm"  # what pip installs; quantkit alone is another project's name there
LONGEST = 1500  # characters of a message; a longer one loses its middle
LONGEST_REASON = 300  # characters of a library's error text
# What libraries say where memory ran out, in errors that are no MemoryError: torch, C++, the kernel, threads.
NO_MEMORY = re.compile(
    r"can(?:'t|not) allocate memory|bad_alloc|out of memory|can't start new thread|failed to map segment"
    r"|without (?:setting an exception|exception set)",  # a SystemError: there was no room for the error itself
    re.IGNORECASE,
)
AMOUNT = re.compile(r"\d[\d.,]*\s*(?:[KMGTPE]i?B|bytes)\b", re.IGNORECASE)


class QuantkitError(Exception):
    """Any error that quantkit explains in one line. The command line prints it and ends with code 1.

    The message is one printable line of bounded length, as it may quote a user's file or a library's error.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message, LONGEST))


class RecipeError(QuantkitError):
    """A recipe, method name or option that cannot be used as written."""


class SweepError(QuantkitError):
    """Tasks of a sweep that failed; the others are done."""


class SourceError(QuantkitError):
    """A checkpoint that is missing, incomplete, unsafe or broken."""


class UnsupportedError(QuantkitError):
    """A model or shape that the method, engine or format cannot take."""


class ValuesError(UnsupportedError):
    """Values that the target type cannot hold. Checks read no values, so no other method is suggested."""


class ArtifactError(QuantkitError):
    """An artifact that is missing, corrupted or not made by quantkit."""


class OutputError(QuantkitError):
    """An output that exists already or cannot be written, or a disk that is too small."""


class ResourceError(QuantkitError):
    """A machine with too little memory for what was asked."""


class TextError(QuantkitError):
    """A text that is missing or too short."""


class DependencyError(QuantkitError):
    """An optional package is missing; the message has the pip command that installs it."""


class EngineError(QuantkitError):
    """A native engine failed, crashed or answered with something unusable."""


class HubError(QuantkitError):
    """The Hugging Face Hub is unreachable, refuses, or has files that must not be mixed with an artifact."""


class RankError(QuantkitError):
    """Another process of a shared conversion has ended, or never started."""


class ReportError(QuantkitError):
    """Reports that cannot be read, or cannot be in one table."""


def near_miss(value: object, known: Iterable[object]) -> str:
    """Return `` Did you mean 'x'?`` if a known name is close to `value`, else an empty string."""
    close = difflib.get_close_matches(str(value).lower(), [str(k).lower() for k in known], n=1, cutoff=0.6)
    if not close:
        return ""
    real = next(k for k in known if str(k).lower() == close[0])
    return f" Did you mean {str(real)!r}?"


def one_line(text: str, most: int) -> str:
    """Return `text` as one printable line of at most `most` characters; a longer one loses its middle."""
    if len(text) > 4 * most:  # keeps the regular expressions fast on megabytes
        text = f"{text[: 2 * most]} {text[-2 * most :]}"
    text = re.sub(r"\s*[\r\n\u2028\u2029]+\s*", " ", text)
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 4 :]}"


def cut(text: str, most: int, joint: str) -> str:
    """Return `text`; cut after `most` bytes, followed by `joint` and a hash that makes it unique."""
    whole = text.encode()
    if len(whole) <= most:
        return text
    return f"{whole[:most].decode(errors='ignore')}{joint}{hashlib.sha256(whole).hexdigest()[:8]}"


def reason_of(error: BaseException) -> str:
    """Return a library's error message as one short line without a full stop, or its type if it has no message."""
    lines = str(error).strip().splitlines()
    first = 1 + (lines[0].rstrip().endswith(":") if lines else 0)  # the first line is only a title
    text = one_line(" ".join(lines[:first]), LONGEST_REASON).rstrip(". ")
    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text}" if isinstance(error, LookupError) or len(text) < 4 else text


def shortage_of(error: BaseException) -> str | None:
    """Return one line if memory ran out, with the requested amount if the error has it; None for other errors.

    Also looks at the errors that caused this one.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        text = str(at)
        if isinstance(at, MemoryError) or NO_MEMORY.search(text):
            asked = AMOUNT.search(text)
            amount = f": {asked.group()} more were requested" if asked else f" ({reason_of(at)})"
            if type(at).__name__ == "OutOfMemoryError":  # torch's, of a GPU
                return f"the GPU's memory ran out{amount}. Stop other processes on the GPU, or give --device cpu."
            return f"this process ran out of memory{amount}. Free some memory or raise the process's limit."
        at = at.__cause__ or at.__context__
    return None


def pip_line(extra: str = "") -> str:
    """Return the shell command that installs quantkit, with one of its extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"


def missing_package(package: str, extra: str, error: ImportError) -> QuantkitError:
    """Return an error that names the extra to install, or one for too little memory to load the package."""
    if short := shortage_of(error):
        return ResourceError(short)
    return DependencyError(
        f"the package {package} is required and cannot be imported ({error}). Install it with: {pip_line(extra)}"
    )
