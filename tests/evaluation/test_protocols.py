import numpy as np
import pytest

from quantkit.contracts.engine import load_cut
from quantkit.data.texts import Text, papers_text
from quantkit.errors import TextError
from quantkit.evaluation.protocols import PROTOCOLS, cut
from quantkit.models.config import context_of

BOS = 99


class Letters:
    """A tokenizer of one token a character, which may put a BOS first."""

    bos_token_id = BOS
    eos_token_id: int | None = None

    def __init__(self, bos=False):
        self._first = [BOS] if bos else []

    def __call__(self, content, **_):
        return {"input_ids": self._first + [ord(c) % 90 for c in content]}


def text_of(length):
    return Text("a text", "".join(chr(90 + i % 90) for i in range(length)))


def ids(found):
    return [window.ids.tolist() for window in found.windows]


def targets(found):
    return [window.targets.tolist() for window in found.windows]


def test_llama_cpp_cuts_windows_without_overlap_and_scores_their_second_halves():
    found = cut(text_of(27), Letters(), "llama.cpp", n_ctx=8)
    assert found.windows[0].ids.dtype == np.int64
    assert ids(found) == [list(range(0, 8)), list(range(8, 16)), list(range(16, 24))]  # 24..26 are dropped
    # Logits at 4, 5, 6 are scored by the tokens at 5, 6, 7.
    assert [window.first for window in found.windows] == [4, 4, 4]
    assert targets(found) == [[5, 6, 7], [13, 14, 15], [21, 22, 23]]
    about = found.about
    assert (about.windows, about.n_ctx, about.first, about.scored, about.documents) == (3, 8, 4, 9, None)
    found = cut(text_of(20), Letters(bos=True), "llama.cpp", n_ctx=8)  # BOS takes the place of each first token
    assert ids(found) == [[BOS, 0, 1, 2, 3, 4, 5, 6], [BOS, 8, 9, 10, 11, 12, 13, 14]]
    about = cut(text_of(1100), Letters(), "llama.cpp").about
    assert (about.windows, about.first, about.scored) == (2, 256, 2 * 255)
    # A limit keeps the first windows.
    assert [window[0] for window in ids(cut(text_of(40), Letters(), "llama.cpp", n_ctx=8, limit=2))] == [0, 8]
    assert cut(text_of(40), Letters(), "llama.cpp", n_ctx=8, limit=100).about.windows == 5


@pytest.mark.parametrize(("name", "texts"), [("papers", ("abcd", "abce")), ("lm-eval", ("ab", "ac"))])
def test_the_hash_of_the_tokens_tells_every_token(name, texts):
    """Also the last one, which is only a target."""
    cuts = [cut(Text("x", text), Letters(name == "lm-eval"), name, n_ctx=4) for text in texts]
    assert len({found.about.tokens_sha256 for found in cuts}) == 2


def test_the_papers_score_every_target_and_leave_tokens_alone_and_short_texts_are_refused():
    found = cut(text_of(19), Letters(bos=True), "papers", n_ctx=8)
    assert ids(found) == [[BOS, 0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13, 14]]
    assert targets(found) == [[0, 1, 2, 3, 4, 5, 6], [8, 9, 10, 11, 12, 13, 14]]
    assert (found.about.first, found.about.scored) == (0, 14)
    assert cut(text_of(2100), Letters(), "papers").about.scored == 2047
    for name, length, least in (("llama.cpp", 15, 2), ("papers", 7, 1)):
        with pytest.raises(TextError, match=f"{length} tokens, but .* {name} needs at least {least} windows of 8"):
            cut(text_of(length), Letters(), name, n_ctx=8)


def test_lm_eval_rolls_windows_over_each_page_by_itself():
    text = Text("two pages", "= A =\nabcdefg\n= B =\nhi\n")
    found = cut(text, Letters(bos=True), "lm-eval", n_ctx=5)
    one, two = (Letters(bos=True)(page)["input_ids"] for page in ("= A =\nabcdefg", "= B =\nhi\n"))
    # As in the harness's own example, the last window of a page is full and scores what is left.
    assert [window.document for window in found.windows] == [0, 0, 0, 1, 1]
    assert targets(found) == [one[:5], one[5:10], one[10:], two[:5], two[5:]]
    whole = [BOS, *one]
    assert ids(found)[:3] == [whole[:5], whole[5:10], whole[len(one) - 5 : len(one)]]
    assert [window.first for window in found.windows[:3]] == [0, 0, 5 - len(one[10:])]
    assert found.about.documents == 2
    # =, A, =, abcdefg and =, B, =, hi, ""
    assert found.sizes.tolist() == [[4, 13], [5, 9]]
    assert (found.about.words, found.about.bytes, found.about.scored) == (9, 22, len(one) + len(two))
    assert cut(text, Letters(bos=True), "lm-eval", n_ctx=5, limit=1).about.documents == 1


def test_lm_eval_takes_the_model_s_context_and_needs_a_first_token():
    found = cut(text_of(40), Letters(bos=True), "lm-eval", config={"max_position_embeddings": 16})
    assert [len(window.ids) for window in found.windows] == [16, 16, 16]
    assert context_of({"text_config": {"n_positions": 7}, "max_position_embeddings": 8}) == 7
    assert context_of({}) == 2048
    tokenizer = Letters()
    tokenizer.bos_token_id = None
    with pytest.raises(TextError, match="neither"):
        cut(text_of(40), tokenizer, "lm-eval")
    tokenizer.eos_token_id = 5
    assert cut(text_of(40), tokenizer, "lm-eval").windows[0].ids[0] == 5


@pytest.mark.parametrize("name", PROTOCOLS)
def test_windows_survive_the_way_to_another_process(name, tmp_path):
    found = cut(text_of(50), Letters(bos=True), name, n_ctx=8)
    found.save(tmp_path / "cut.npz")
    again = load_cut(tmp_path / "cut.npz")
    assert (ids(again), targets(again), again.about) == (ids(found), targets(found), found.about)
    assert [(w.first, w.document) for w in again.windows] == [(w.first, w.document) for w in found.windows]
    assert again.sizes.tolist() == found.sizes.tolist()


def test_rows_are_joined_with_a_blank_line_as_in_the_papers():
    # The dataset's rows: '', ' = Title = \n', '', ' Text .\n'
    assert papers_text(" \n = Title = \n \n Text .\n") == "\n\n = Title = \n\n\n\n\n Text .\n"
    assert (
        papers_text("one\u2028two\x0cthree\x85\r four\n") == "one\u2028two\x0cthree\x85\r four\n"
    )  # which are one row
    text = Text("rows", "ab\n \ncd\n")
    [papers] = ids(cut(text, Letters(), "papers", n_ctx=10))
    assert papers == Letters()("ab\n\n\n\n\ncd\n")["input_ids"]
    one, two = ids(cut(text, Letters(), "llama.cpp", n_ctx=4))
    assert one + two == Letters()("ab\n \ncd\n")["input_ids"]


def test_papers_text_of_wikitext_has_the_published_number_of_rows(shared_data):
    content = (shared_data / "wikitext2" / "wiki.test.raw").read_text(encoding="utf-8")
    rows = ["" if not line.strip() else line + "\n" for line in content.split("\n")[:-1]]
    assert len(rows) == 4358
    assert papers_text(content) == "\n\n".join(rows)
