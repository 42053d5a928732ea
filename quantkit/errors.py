"""The errors that quantkit raises. Each message says what is wrong, where, and what to do."""

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
    """Base of all errors that quantkit explains to users. The command line prints it and exits with code 1.

    The message is one printable line of at most `LONGEST` characters: it may quote a user's file or a library's error.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message, LONGEST))


class RecipeError(QuantkitError):
    """A recipe, name or option is invalid."""


class SweepError(QuantkitError):
    """Some tasks of a sweep failed; the other tasks are done."""


class SourceError(QuantkitError):
    """A source checkpoint is missing, incomplete, unsafe or damaged."""


class UnsupportedError(QuantkitError):
    """A method, engine or format does not support this model or shape."""


class ValuesError(UnsupportedError):
    """A value is outside the range of the target type. No other method is suggested: checks read no values."""


class ArtifactError(QuantkitError):
    """An artifact is missing, corrupted or not made by quantkit."""


class OutputError(QuantkitError):
    """An output exists already, cannot be written, or does not fit on the disk."""


class ResourceError(QuantkitError):
    """The machine does not have enough memory."""


class TextError(QuantkitError):
    """A text is missing, too short or invalid."""


class DependencyError(QuantkitError):
    """A package is missing; the message has the command that installs it."""


class EngineError(QuantkitError):
    """An engine failed, crashed or returned unusable results."""


class HubError(QuantkitError):
    """The Hugging Face Hub is unreachable or refuses a request, or a repository has conflicting files."""


class RankError(QuantkitError):
    """Another process of a shared conversion ended or never started."""


class ReportError(QuantkitError):
    """A report cannot be read, or reports cannot be joined into one table."""


def near_miss(value: object, known: Iterable[object]) -> str:
    """Return `` Did you mean 'x'?`` if a known name is similar to `value`, else an empty string."""
    close = difflib.get_close_matches(str(value).lower(), [str(k).lower() for k in known], n=1, cutoff=0.6)
    if not close:
        return ""
    real = next(k for k in known if str(k).lower() == close[0])
    return f" Did you mean {str(real)!r}?"


def one_line(text: str, most: int) -> str:
    """Return `text` as one printable line of at most `most` characters; a longer text loses its middle."""
    if len(text) > 4 * most:  # keeps the regular expressions fast on megabytes
        text = f"{text[: 2 * most]} {text[-2 * most :]}"
    text = re.sub(r"\s*[\r\n\u2028\u2029]+\s*", " ", text)
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 4 :]}"


def cut(text: str, most: int, joint: str) -> str:
    """Return `text`, or if it exceeds `most` bytes its beginning, `joint` and a hash that makes it unique."""
    whole = text.encode()
    if len(whole) <= most:
        return text
    return f"{whole[:most].decode(errors='ignore')}{joint}{hashlib.sha256(whole).hexdigest()[:8]}"


def reason_of(error: BaseException) -> str:
    """Return an exception's message as one short line without a full stop, or its type if it has no message."""
    lines = str(error).strip().splitlines()
    first = 1 + (lines[0].rstrip().endswith(":") if lines else 0)  # the first line is only a title
    text = one_line(" ".join(lines[:first]), LONGEST_REASON).rstrip(". ")
    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text}" if isinstance(error, LookupError) or len(text) < 4 else text


def shortage_of(error: BaseException) -> str | None:
    """Return one line if memory ran out, with the requested amount if known; None for other errors.

    The error's causes are examined, too.
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
    """Return the shell command that installs quantkit, with an optional extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"


def missing_package(package: str, extra: str, error: ImportError) -> QuantkitError:
    """Return an error that names the extra to install, or a ResourceError if memory ran out on import."""
    if short := shortage_of(error):
        return ResourceError(short)
    return DependencyError(
        f"the package {package} is required and cannot be imported ({error}). Install it with: {pip_line(extra)}"
    )
