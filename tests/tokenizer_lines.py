"""Lines that tokenizers are held against each other on."""

import contextlib
from itertools import cycle
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared" / "data"
LINES = 5000
# Broken whitespace, digits, emoji, scripts, bytes that are no text elsewhere.
ODD = [
    "a  b   c    d", "\ta\t\tb", "  two before", "after  ", "1 22 333 4444 55555 666666", "3.14e-10, 0x7F, ½ ²",
    "naïve café ¡ñ!", "漢字とかな 한국어", "\U0001f680\U0001f468\u200d\U0001f469\U0001f3fd \u2764\ufe0f",
    "\u0645\u0631\u062d\u0628\u0627", "Привет, мир", "def f(x):\n    return x**2\n", "I'M they'LL we'd 'tis",
    "a\r\nb\r\n", "x\u00a0y\u2003z", "https://example.org/?q=1&r=2", "\u200bzero", "\ufb01 \ufb02 \u212b",
]  # fmt: skip


def shared(*parts):
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"the shared file {'/'.join(parts)} is absent")
    return path


@contextlib.contextmanager
def vocabulary_of(path):
    """A function text -> ids that llama.cpp computes from the file alone."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the reference of this test")
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    try:
        yield lambda text, special=False: model.tokenize(text.encode(), add_bos=True, special=special)
    finally:
        model.close()


def lines_of(path, count):
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    assert len(lines) >= count
    return lines[:count]


def lines():
    texts = lines_of(shared("calibration", "groups_merged.txt"), 1300) + lines_of(shared("calibration", "c4.txt"), 580)
    pairs = zip(texts * 2, cycle(ODD), cycle(ODD[1:]), strict=False)
    made = [f"{before} {line[:60]} {after}" for line, before, after in pairs]
    chosen = [*ODD, *texts, *made][:LINES]
    assert len(chosen) == LINES
    return chosen
