import re
from itertools import pairwise, product

import numpy as np

from quantkit.data.chat import Conversation
from quantkit.data.passages import hashes_of
from quantkit.data.texts import KINDS, NAMES, load_text, parts_of, sample_text
from quantkit.records.recipe import TEXTS

HALVES = ("calibration", "evaluation")


def test_a_bundled_text_is_had_by_its_name_which_the_help_tells():
    assert [name for name in re.findall(r"\w+", TEXTS) if name in NAMES] == list(NAMES)
    for name, split in product(NAMES, HALVES):
        text = load_text(name, split)
        title = "sample" if name == "sample" else f"text {name}"
        assert (text.name, text.bundled) == (f"quantkit's bundled {title}, {split} part", True)
        assert bool(text.parts) == (name in ("chat", "mixed"))
    assert load_text("sample", "calibration") == sample_text("calibration")
    assert load_text("articles", "evaluation").sha256 == load_text("sample", "evaluation").sha256


def test_no_passage_of_a_half_is_in_the_other():
    calibration, evaluation = (
        np.concatenate([hashes_of(load_text(name, split).content) for name in NAMES]) for split in HALVES
    )
    assert min(len(calibration), len(evaluation)) > 10_000
    assert not set(calibration.tolist()) & set(evaluation.tolist())


def test_a_kind_is_cut_where_its_documents_begin():
    assert all(str(part).startswith(" = ") for part in parts_of("articles", "evaluation"))
    assert [len(parts_of("articles", split)) for split in HALVES] == [34, 20]
    for split in HALVES:
        code = [str(part) for part in parts_of("code", split)]
        assert len(code) == sum(text.count(" file: ") for text in code) >= 18
        assert all(re.match(r"\S+ file: ", text) for text in code)
        for conversation in parts_of("chat", split):
            assert isinstance(conversation, Conversation)
            roles = [role for role, _ in conversation.messages]
            assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert {"怎", "駅", "П", "W", "L"} <= {str(part)[0] for part in parts_of("languages", "evaluation")}


def test_every_stretch_of_mixed_holds_all_kinds():
    for split in HALVES:
        mixed = parts_of("mixed", split)
        kinds = {part: kind for kind in KINDS for part in parts_of(kind, split)}
        assert sorted(map(str, mixed)) == sorted(map(str, kinds))
        edges = [round(len(mixed) * share / 4) for share in range(5)]
        for start, end in pairwise(edges):
            assert {kinds[part] for part in mixed[start:end]} == set(KINDS)
