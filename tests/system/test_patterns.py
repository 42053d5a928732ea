"""Regular expressions of others: right answers, and an end for those that have none."""

import re
import time

import pytest

from quantkit.errors import SourceError
from quantkit.system import patterns
from quantkit.system.patterns import full_matches

NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head", "xq_proj"]


def matches(*asked: str) -> list[list[str]]:
    return [sorted(found) for found in full_matches(list(asked), NAMES, "the patterns", SourceError)]


@pytest.mark.parametrize(
    "pattern",
    ["lm_head", "lm.head", "q_proj", r"(.*\.)?(q_proj)", r"(.*\.)?(layers.1.mlp.down_proj)", r".*\.(q|down)_proj", ""],
)
def test_answers_are_those_of_re(pattern: str) -> None:
    assert matches(pattern) == [sorted(name for name in NAMES if re.fullmatch(pattern, name))]


def test_answers_come_in_the_order_of_the_patterns() -> None:
    assert matches(r"lm_.*", "lm_head", r"model\.layers\.0\..*", "nothing") == [
        ["lm_head"],
        ["lm_head"],
        ["model.layers.0.self_attn.q_proj"],
        [],
    ]


def test_plain_names_are_matched_without_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_in_child", None)
    assert matches(r"(.*\.)?(q_proj)", "lm_head") == [["model.layers.0.self_attn.q_proj"], ["lm_head"]]
    for clever in (r"(a+)+", r"(.*\.)?((a|a)*b)", r"(.*\.)?(q_proj))?(", "lm_head|x"):
        with pytest.raises(TypeError):
            matches(clever)


@pytest.mark.parametrize("pattern", [r"(.*_)*x", r"(?:\w|\w)*-"])
def test_an_expression_without_an_end_is_ended(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(SourceError, match=r"the patterns: matching takes more than 0\.5 seconds"):
        full_matches([pattern], ["a_" * 2000], "the patterns", SourceError)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "(?P<a", "[z-a]", "(" * 3000])
def test_what_is_no_expression_is_told(pattern: str) -> None:
    with pytest.raises(SourceError, match="the patterns: "):
        matches(pattern)


def test_a_long_one_is_refused() -> None:
    with pytest.raises(SourceError, match="characters"):
        matches("a" * 5000)
