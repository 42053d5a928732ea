"""The tree of errors a user can meet. Each message says what, where, the value it got, and the fix."""

import difflib
import hashlib
import re
from collections.abc import Iterable

DISTRIBUTION = "quantkit-lm"  # what pip installs; quantkit alone is another project's name there
LONGEST = 1500  # characters of a message; of a longer one the middle is left out
LONGEST_REASON = 300  # characters of what somebody else's error says
# What libraries say where memory ran out, in errors that are no MemoryError: torch, C++, the kernel, threads.
NO_MEMORY = re.compile(
    r"can(?:'t|not) allocate memory|bad_alloc|out of memory|can't start new thread|failed to map segment"
    r"|without (?:setting an exception|exception set)",  # a SystemError: there was no room for the error itself
    re.IGNORECASE,
)
AMOUNT = re.compile(r"\d[\d.,]*\s*(?:[KMGTPE]i?B|bytes)\b", re.IGNORECASE)


class QuantkitError(Exception):
    """Any error that quantkit explains in one line. The command line prints it and ends with code 1.

    What a message repeats of a user's file or of a foreign error is made one printable line of bounded length.
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
    """Values beyond what is stored. Other methods' checks read no values, so nobody knows which would take them."""


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


class HubError(QuantkitError):
    """The Hugging Face Hub cannot be reached, refuses, or holds what must not be mixed with an artifact."""


class RankError(QuantkitError):
    """Another of the processes that share one piece of work has ended, or did not come."""


class ReportError(QuantkitError):
    """Reports that must not stand in one table, or that cannot be read."""


def near_miss(value: object, known: Iterable[object]) -> str:
    """Return `` Did you mean 'x'?`` where a known name is close to `value`, else an empty string."""
    close = difflib.get_close_matches(str(value).lower(), [str(k).lower() for k in known], n=1, cutoff=0.6)
    if not close:
        return ""
    real = next(k for k in known if str(k).lower() == close[0])
    return f" Did you mean {str(real)!r}?"


def one_line(text: str, most: int) -> str:
    """`text` as one printable line of at most `most` characters; of a longer one the middle is left out."""
    if len(text) > 4 * most:  # nothing is done with megabytes
        text = f"{text[: 2 * most]} {text[-2 * most :]}"
    text = re.sub(r"\s*[\r\n\u2028\u2029]+\s*", " ", text)
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 4 :]}"


def cut(text: str, most: int, joint: str) -> str:
    """`text`; one of more than `most` bytes cut there, and after the `joint` a hash that tells it from others."""
    whole = text.encode()
    if len(whole) <= most:
        return text
    return f"{whole[:most].decode(errors='ignore')}{joint}{hashlib.sha256(whole).hexdigest()[:8]}"


def reason_of(error: BaseException) -> str:
    """What a foreign error says, in one short line without a full stop; its kind where its words say too little."""
    lines = str(error).strip().splitlines()
    first = 1 + (lines[0].rstrip().endswith(":") if lines else 0)  # what it says stands below its title
    text = one_line(" ".join(lines[:first]), LONGEST_REASON).rstrip(". ")
    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text}" if isinstance(error, LookupError) or len(text) < 4 else text


def shortage_of(error: BaseException) -> str | None:
    """One line that says that memory ran out, with how much was asked where the error tells it; None for others.

    The error that it was raised for counts, too.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        text = str(at)
        if isinstance(at, MemoryError) or NO_MEMORY.search(text):
            asked = AMOUNT.search(text)
            amount = f": {asked.group()} more were asked for" if asked else f" ({reason_of(at)})"
            if type(at).__name__ == "OutOfMemoryError":  # torch's, of a GPU
                return f"the GPU's memory ran out{amount}. End what else uses the GPU, or give --device cpu."
            return (
                f"the memory that this process may take ran out{amount}. Free some, raise its limit, or ask for less."
            )
        at = at.__cause__ or at.__context__
    return None


def pip_line(extra: str = "") -> str:
    """Return the shell command that installs quantkit, with one of its extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"


def missing_package(package: str, extra: str, error: ImportError) -> QuantkitError:
    """Say which extra brings an optional package, or that there was too little memory to load it."""
    if short := shortage_of(error):
        return ResourceError(short)
    return DependencyError(
        f"the package {package} is needed here and cannot be imported ({error}). Install it with: {pip_line(extra)}"
    )
