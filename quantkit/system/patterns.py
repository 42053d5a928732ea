"""Regular expressions from a user's file: matched in a child process with a time limit.

Twenty characters can keep Python's `re` busy for years, and no thread can stop it. The timeout of the package `regex`
is not reliable: one of 2 s took 19 s, and compiling nested repetitions fills the memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

from quantkit.errors import QuantkitError
from quantkit.system.untrusted import shown

SECONDS = 20  # for all names and expressions; thousands of both take less than one
MOST_PATTERNS, LONGEST_PATTERN = 20_000, 4096
# Harmless: only the beginning of a path can repeat, once.
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
    """Return for each pattern the names that it matches from end to end; raises `error`, which begins with `what`."""
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
        raise error(f"{what}: it cannot be matched ({shown(patterns[0])})")
    answers = json.loads(child.stdout)
    for pattern, answer in zip(patterns, answers, strict=True):
        if isinstance(answer, str):
            raise error(f"{what}: {shown(pattern)} is no regular expression ({answer})")
    return [frozenset(answer) for answer in answers]
