import re

import numpy as np
import pytest
from tiny_models import SAMPLE

from quantkit.data.passages import SKETCH_SIZE, WORDS, hashes_of, seen_in, sketch_of
from quantkit.errors import RecipeError
from quantkit.records.artifact import MOST_PASSAGES, CalibrationEntry
from quantkit.records.recipe import parse

THIRTEEN = "one two three four five six seven eight nine ten eleven twelve thirteen"
ENTRY = {"text": "a text", "sha256": "0" * 64, "sequences": 1, "length": 512, "requested": 1}


def passages(*texts):
    """The slow reference: all runs of words."""
    split = [re.findall(r"\w+", text.lower()) for text in texts]
    return {tuple(words[at : at + WORDS]) for words in split for at in range(len(words) - WORDS + 1)}


def random_words(seed, count):
    return [f"w{number}" for number in np.random.default_rng(seed).integers(0, 5000, count)]


def test_a_passage_is_thirteen_words():
    assert len(hashes_of(THIRTEEN)) == 1
    assert len(hashes_of(THIRTEEN.removesuffix(" thirteen"))) == 0
    assert hashes_of(f"zero {THIRTEEN}")[1] == hashes_of(THIRTEEN)[0]
    # Case and what stands between words do not count.
    assert hashes_of(THIRTEEN.upper().replace(" ", " , @-@ \n")).tolist() == hashes_of(THIRTEEN).tolist()
    assert hashes_of(THIRTEEN.replace("two three", "three two")).tolist() != hashes_of(THIRTEEN).tolist()
    # A passage does not reach from one text to the next.
    first, second = THIRTEEN.split(" seven ")
    assert sketch_of([first, f"seven {second}"]) == ""
    assert seen_in(sketch_of([THIRTEEN]), [first, f"seven {second}"]).sampled == 0


@pytest.mark.parametrize("text", ["駅前の傘立て私の町の小さな", "ผมไปตลาดทุกวันเ"[:13]])
def test_characters_of_scripts_without_spaces_are_words(text):
    assert len(text) == 13
    assert len(hashes_of(text)) == 1
    assert len(hashes_of(text[:6] + "two words" + text[6:])) == 3


def test_a_text_has_as_many_passages_as_the_slow_reference_finds():
    text = SAMPLE.read_text(encoding="ascii", errors="ignore")  # scripts without spaces are tested above
    assert len(np.unique(hashes_of(text))) == len(passages(text)) > 10_000


def test_where_all_hashes_are_kept_the_share_is_exact():
    words = random_words(0, 700)
    before, text = " ".join(words[:500]), " ".join(words[300:])
    seen = seen_in(sketch_of([before]), [text, text])
    both = passages(before) & passages(text)
    assert (seen.seen, seen.sampled) == (len(both), len(passages(text))) == (188, 388)
    assert seen.share == 188 / 388
    few = seen_in(sketch_of([" ".join(words[:15])]), [text, " ".join(words[:20])])
    assert (few.seen, few.sampled) == (3, 388 + 8)


def test_of_long_texts_the_share_is_estimated():
    words = random_words(1, 60_000)
    texts = [" ".join(words[at : at + 400]) for at in range(0, 60_000, 400)]
    sketch = sketch_of(texts[:100])
    assert len(sketch) == MOST_PASSAGES
    assert sketch == sketch_of(reversed(texts[:100]))
    seen = seen_in(sketch, texts[75:])
    assert seen.share == pytest.approx(1 / 3, abs=0.06)  # three standard errors of the sample
    assert seen.sampled == pytest.approx(SKETCH_SIZE * 30 / 40, rel=0.15)
    assert seen_in(sketch, [" ".join(random_words(2, 30_000))]).seen == 0


def test_only_passages_among_others_are_counted():
    words = random_words(3, 200)
    header, said = " ".join(words[:100]), " ".join(words[100:])
    sketch = sketch_of([header])
    assert seen_in(sketch, [header, said]).seen == 88
    seen = seen_in(sketch, [header, said], among=[said])
    assert (seen.seen, seen.sampled) == (0, 88)
    assert sketch_of([]) == ""
    assert seen_in("", [THIRTEEN]).share == seen_in(sketch, []).share == 0


@pytest.mark.parametrize("bad", ["AAAA", "AAAAAAA-", "A" * (MOST_PASSAGES + 8), "AAAAAAAA\n"])
def test_damaged_passages_are_refused(bad):
    with pytest.raises(RecipeError, match="passages"):
        parse(CalibrationEntry, {**ENTRY, "passages": bad}, "the manifest")
    assert parse(CalibrationEntry, {**ENTRY, "passages": "A" * MOST_PASSAGES}, "the manifest").passages
    assert parse(CalibrationEntry, ENTRY, "the manifest").model_dump() == ENTRY
