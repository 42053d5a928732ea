import random

import pytest

from quantkit.data.texts import clean, count_words, pages

CLEANED = {
    "a @-@ b 1 @,@ 000 2 @.@ 5": "a-b 1,000 2.5",
    "one ; two : three . four ! five ? six , seven": "one; two: three. four! five? six, seven",
    "( a ) [ b ] { c } \" d \" ' e '": "(a) [b] {c} \"d\" 'e'",
    " = = Part = = \n text": " == Part ==\ntext",
    "the dogs ' tails": "the dogs' tails",
    "an N here , 5 \u00b0 C , it 's": "an 1 here, 5\u00b0C, it's",
}
TEXT = " \n = One = \n \n Of it . \n \n = = Part = = \n More . \n = Two = \n Last"


def test_a_page_begins_at_a_title_and_keeps_its_sections_and_spaces_around_punctuation_go():
    assert {given: clean(given) for given in CLEANED} == CLEANED
    assert pages(TEXT) == [" = One = \n \n Of it . \n \n = = Part = = \n More . ", " = Two = \n Last"]
    assert pages("before\n = One = \nafter") == ["before", " = One = \nafter"]
    assert pages("no title") == ["no title"]
    assert count_words(" a  b \n c") == 4


def test_it_equals_the_harness(shared_data):
    harness = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")
    generator = random.Random(0)
    made = ["".join(generator.choices("s '\"()[]{}@-@,.:;!?=N0\n \u00b0ab", k=40)) for _ in range(3000)]
    whole = pages((shared_data / "wikitext2" / "wiki.test.raw").read_text(encoding="utf-8"))
    assert len(whole) == 62
    for page in made + whole:
        assert clean(page) == harness.wikitext_detokenizer({"page": page})
        assert count_words(page) == harness.process_results({"page": page}, (0.0,))["word_perplexity"][1]
