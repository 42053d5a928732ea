"""Read untrusted files: size limits, and one error type for all failures of third-party parsers.

For a damaged file, parsers may raise anything: RecursionError, OverflowError, KeyError, even BaseExceptions (a panic in
a Rust library). `reraise_as` turns them into one QuantkitError with the file, the reason and the fix. Values in a file
are checked against limits before use.
Regular expressions from files are matched in a child process with a time limit: twenty characters can keep Python's
`re` busy for years, and threads cannot be stopped. The timeout of the package `regex` is unreliable: one of 2 s took
19 s, and compiling nested repetitions exhausts memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError, ResourceError, one_line, reason_of, shortage_of

Raised = type[QuantkitError]

MOST_JSON = 1 << 28  # bytes; the largest published tokenizer.json has some 35 MB
MOST_YAML = 1 << 20  # bytes of a recipe or of a model card's head
MOST_NODES = 100_000  # values of a YAML text with its aliases expanded: bytes must not become gigabytes
LARGEST_NAME = 4096  # characters of a path
DEEPEST = 64  # levels of lists and mappings in a configuration
LONGEST_VALUE = 120  # characters of a value that a message repeats


@contextmanager
def reraise_as(what: str, error: Raised, fix: str = "") -> Iterator[None]:
    """Turn any exception inside the context into `error` with the message ``WHAT: reason. FIX``.

    QuantkitErrors and interruptions pass through; running out of memory becomes a ResourceError.
    """
    try:
        yield
    except (QuantkitError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as raised:  # a panic of a Rust library derives from BaseException
        if short := shortage_of(raised):
            raise ResourceError(f"{what}: {short}") from raised
        raise error(f"{what}: {reason_of(raised)}. {fix}".rstrip()) from raised


@contextmanager
def silenced() -> Iterator[None]:
    """Suppress standard error: a Rust library prints a panic before it becomes an exception."""
    sys.stderr.flush()
    original, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
        os.close(nowhere)


def read_text(path: Path, error: Raised, fix: str = "", most: float = MOST_JSON) -> str:
    """Read a UTF-8 file of at most `most` bytes; raise `error`."""
    with reraise_as(f"{path} cannot be read", error, fix):
        size = path.stat().st_size
        if size > most:
            raise error(f"{path} has {size:,} bytes, but such files have at most {most:,}. {fix}".rstrip())
        data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as wrong:
        raise error(f"{path} is not UTF-8 text (byte {wrong.start}). {fix}".rstrip()) from None


def parse_json(text: str | bytes, what: str, error: Raised, fix: str = "") -> Any:
    """Parse JSON text; raise `error`."""
    with reraise_as(f"{what} is not valid JSON", error, fix):
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return _without_halves(json.loads(text), text)


def read_json(path: Path, error: Raised, fix: str = "", most: int = MOST_JSON) -> Any:
    """Parse a JSON file of at most `most` bytes; raise `error`."""
    return parse_json(read_text(path, error, fix, most), str(path), error, fix)


def read_object(path: Path, error: Raised, fix: str = "", most: int = MOST_JSON) -> dict[str, Any]:
    """Parse a JSON file that holds an object, with limited nesting; raise `error`."""
    values = read_json(path, error, fix, most)
    if not isinstance(values, dict):
        raise error(f"{path} is not a JSON object. {fix}".rstrip())
    if depth_exceeds(values, DEEPEST):
        raise error(f"{path} is nested deeper than {DEEPEST} levels. {fix}".rstrip())
    return values


def depth_exceeds(value: Any, most: int) -> bool:
    """Return whether lists and dicts are nested deeper than `most` levels."""
    level = [value]
    for _ in range(most + 1):
        held = [item for item in level if isinstance(item, dict | list)]
        level = [inner for item in held for inner in (item.values() if isinstance(item, dict) else item)]
    return bool(level)


def parse_yaml(text: str, what: str, error: Raised, fix: str = "", plain: bool = False) -> Any:
    """Parse YAML text; `plain`: all scalars stay strings. Raises `error`."""
    import yaml

    if len(text) > MOST_YAML:
        raise error(f"{what} has {len(text):,} characters; at most {MOST_YAML:,} are read. {fix}".rstrip())
    with reraise_as(f"{what} is not valid YAML", error, fix):
        loader: type[Any] = yaml.BaseLoader if plain else yaml.SafeLoader
        tree = yaml.compose(text, loader)
        if tree is None:
            return None
        if _count_nodes(tree, {}) > MOST_NODES:
            raise error(f"{what}: its aliases stand for more than {MOST_NODES:,} values. {fix}".rstrip())
        return _without_halves(yaml.load(text, loader), text)


def _without_halves(value: Any, text: str) -> Any:
    """Return `value`; raise ValueError if `text` escapes a lone surrogate, which UTF-8 cannot encode."""
    if re.search(r"\\(?:u|U0000)[dD][89a-fA-F]", text):
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise ValueError("a string has half of a surrogate pair, which is not UTF-8") from None
    return value


def _count_nodes(node: Any, known: dict[int, float]) -> float:
    """Return the number of values that a YAML node expands to; infinite if it contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf  # until its content is counted
        inner = node.value if isinstance(node.value, list) else ()
        parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_count_nodes(part, known) for part in parts)
    return known[id(node)]


def path_of(text: str | Path, error: Raised) -> Path:
    """Return a user's path with ``~`` expanded; raise `error` for an impossible one."""
    name = str(text)
    if "\0" in name or len(name) > LARGEST_NAME:
        raise error(f"{name[:80]!r} cannot be the name of a file or folder")
    try:
        path = Path(name).expanduser()
        path.exists()
    except (RuntimeError, OSError, ValueError) as wrong:
        raise error(f"the path {name[:200]!r} cannot be used: {reason_of(wrong)}") from None
    return path


def inside(folder: Path, path: Path) -> bool:
    """Return whether `path`, with links resolved, is in `folder` or in the store that a Hub cache links to."""
    try:
        real, root = path.resolve(), folder.resolve()
    except (RuntimeError, OSError):  # circular links
        return False
    stores = [root]
    if root.parent.name == "snapshots":
        stores.append(root.parent.parent / "blobs")
    return any(real.is_relative_to(store) for store in stores)


def whole_number(values: Mapping[str, Any], key: str, least: int, most: int, where: str, error: Raised) -> int | None:
    """Return the integer at `key`, or None if missing; raise `error` for another type or a value out of range."""
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise error(f"{where}: {key} is {shown(value)}, not a whole number from {least:,} to {most:,}")
    return value


def shown(value: object) -> str:
    """Format a user's value for a message: short, on one line."""
    try:
        return one_line(_SHORT.repr(value), LONGEST_VALUE)
    except ValueError:  # Python cannot print a number of more than 4,300 digits
        return f"a {type(value).__name__} of too many digits"


_SHORT = reprlib.Repr()  # limits the text before a value with aliases becomes gigabytes
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 4 * LONGEST_VALUE, 4 * LONGEST_VALUE
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 20


SECONDS = 20  # for all names and expressions; thousands of them take less than one second
MOST_PATTERNS, LONGEST_PATTERN = 20_000, 4096
# Harmless expressions: only the beginning of a path can repeat, once.
PLAIN = re.compile(r"(?:\(\.\*\\\.\)\?\([\w.]*\)|[\w.]*)")
MATCH = """
import json, re, sys
ask = json.load(sys.stdin)
def found(pattern):
    try:
        match = re.compile(pattern).fullmatch
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return [name for name in ask["names"] if match(name)]
json.dump([found(pattern) for pattern in ask["patterns"]], sys.stdout)
"""


def full_matches(patterns: list[str], names: list[str], what: str, error: type[QuantkitError]) -> list[frozenset[str]]:
    """Return, for each pattern, the names that it matches in full; raise `error`, whose text begins with `what`."""
    if len(patterns) > MOST_PATTERNS or any(len(pattern) > LONGEST_PATTERN for pattern in patterns):
        raise error(f"{what}: more than {MOST_PATTERNS} expressions, or one of more than {LONGEST_PATTERN} characters")
    rest = [pattern for pattern in patterns if not PLAIN.fullmatch(pattern)]
    foreign = dict(zip(rest, _in_child(rest, names, what, error), strict=True)) if rest else {}
    return [
        foreign[pattern] if pattern in foreign else frozenset(filter(re.compile(pattern).fullmatch, names))
        for pattern in patterns
    ]


def _in_child(patterns: list[str], names: list[str], what: str, error: type[QuantkitError]) -> list[frozenset[str]]:
    command = [sys.executable, "-I", "-S", "-c", MATCH]
    ask = json.dumps({"patterns": patterns, "names": names})
    try:
        child = subprocess.run(command, input=ask.encode(), capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise error(f"{what}: matching takes more than {SECONDS} seconds ({shown(patterns[0])})") from None
    if child.returncode != 0:
        raise error(f"{what}: matching failed ({shown(patterns[0])})")
    answers = json.loads(child.stdout)
    for pattern, answer in zip(patterns, answers, strict=True):
        if isinstance(answer, str):
            raise error(f"{what}: {shown(pattern)} is not a regular expression ({answer})")
    return [frozenset(answer) for answer in answers]
