import re
import time

import pytest

from quantkit.errors import SourceError
from quantkit.system import untrusted as patterns
from quantkit.system.untrusted import full_matches

NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head", "xq_proj"]


def matches(*asked):
    return [sorted(found) for found in full_matches(list(asked), NAMES, "the patterns", SourceError)]


def test_answers_are_those_of_re_in_the_order_of_the_patterns():
    clever = [r"(.*\.)?(q_proj)", r"(.*\.)?(layers.1.mlp.down_proj)", r".*\.(q|down)_proj"]
    asked = ["lm_head", "lm.head", "q_proj", *clever, ""]
    assert matches(*asked) == [sorted(name for name in NAMES if re.fullmatch(one, name)) for one in asked]


def test_plain_names_are_matched_without_another_process(monkeypatch):
    monkeypatch.setattr(patterns, "_in_child", None)
    assert matches(r"(.*\.)?(q_proj)", "lm_head") == [["model.layers.0.self_attn.q_proj"], ["lm_head"]]
    for clever in (r"(a+)+", r"(.*\.)?((a|a)*b)", r"(.*\.)?(q_proj))?(", "lm_head|x"):
        with pytest.raises(TypeError):
            matches(clever)


def test_an_expression_without_an_end_is_ended(monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(SourceError, match=r"the patterns: matching takes more than 0\.5 seconds"):
        full_matches([r"(.*_)*x"], ["a_" * 2000], "the patterns", SourceError)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "(" * 3000, "a" * 5000])
def test_what_is_no_expression_or_too_long_is_refused(pattern):
    with pytest.raises(SourceError, match="the patterns: "):
        matches(pattern)
