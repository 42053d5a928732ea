"""Windows, scored positions and perplexity by hand."""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.errors import RecipeError, TextError
from quantkit.probes.perplexity import summarize, token_nll
from quantkit.protocol import cut, find_protocol
from quantkit.text import Text, papers_text

BOS = 99


class Letters:
    """A tokenizer of one token a character, which may put a BOS first."""

    bos_token_id = BOS

    def __init__(self, bos: bool = False) -> None:
        self._first = [BOS] if bos else []

    def __call__(self, content: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self._first + [ord(c) % 90 for c in content]}


def text_of(length: int) -> Text:
    return Text("a text", "".join(chr(90 + i % 90) for i in range(length)))


def test_llama_cpp_cuts_windows_without_overlap_and_scores_their_second_halves() -> None:
    tokens, windows = cut(text_of(27), Letters(), "llama.cpp", n_ctx=8)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [list(range(0, 8)), list(range(8, 16)), list(range(16, 24))]  # 24..26 are dropped
    # Logits at 4, 5, 6 are judged by the tokens at 5, 6, 7.
    assert (windows.windows, windows.n_ctx, windows.first, windows.scored) == (3, 8, 4, 9)
    assert windows.tokens_sha256 == hashlib.sha256(np.arange(24, dtype=np.int64).tobytes()).hexdigest()


def test_llama_cpp_puts_bos_in_place_of_each_first_token() -> None:
    tokens, _ = cut(text_of(20), Letters(bos=True), "llama.cpp", n_ctx=8)
    assert tokens.tolist() == [[BOS, 0, 1, 2, 3, 4, 5, 6], [BOS, 8, 9, 10, 11, 12, 13, 14]]


def test_the_papers_score_every_target_and_leave_tokens_alone() -> None:
    tokens, windows = cut(text_of(19), Letters(bos=True), "papers", n_ctx=8)
    assert tokens.tolist() == [[BOS, 0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13, 14]]
    assert (windows.first, windows.scored) == (0, 14)


def test_a_limit_keeps_the_first_windows() -> None:
    tokens, windows = cut(text_of(40), Letters(), "llama.cpp", n_ctx=8, limit=2)
    assert tokens[:, 0].tolist() == [0, 8]
    assert windows.windows == 2
    _, windows = cut(text_of(40), Letters(), "llama.cpp", n_ctx=8, limit=100)
    assert windows.windows == 5


def test_the_windows_of_the_protocols() -> None:
    assert find_protocol("llama.cpp").n_ctx == 512
    assert find_protocol("papers").n_ctx == 2048
    _, windows = cut(text_of(1100), Letters(), "llama.cpp")
    assert (windows.windows, windows.first, windows.scored) == (2, 256, 2 * 255)
    _, windows = cut(text_of(2100), Letters(), "papers")
    assert (windows.windows, windows.scored) == (1, 2047)


@pytest.mark.parametrize(("name", "length", "least"), [("llama.cpp", 15, 2), ("papers", 7, 1)])
def test_a_text_that_is_too_short_is_refused(name: str, length: int, least: int) -> None:
    message = (
        f"the text a text is too short: {length} tokens, but the protocol {name} needs at least {least} windows of 8"
    )
    with pytest.raises(TextError, match=message):
        cut(text_of(length), Letters(), name, n_ctx=8)


def test_an_unknown_protocol_gets_a_hint() -> None:
    with pytest.raises(RecipeError, match="Did you mean 'papers'"):
        cut(text_of(100), Letters(), "paper")


def test_rows_are_joined_with_a_blank_line_as_in_the_papers() -> None:
    # The dataset's rows: '', ' = Title = \n', '', ' Text .\n'
    assert papers_text(" \n = Title = \n \n Text .\n") == "\n\n = Title = \n\n\n\n\n Text .\n"
    assert papers_text("\na\n\nb") == "\n\na\n\n\n\n\nb"
    assert papers_text("") == ""


def test_papers_text_of_wikitext_has_the_published_number_of_rows(shared_data: Path) -> None:
    content = (shared_data / "wikitext2" / "wiki.test.raw").read_text(encoding="utf-8")
    rows = ["" if not line.strip() else line + "\n" for line in content.split("\n")[:-1]]
    assert len(rows) == 4358
    assert papers_text(content) == "\n\n".join(rows)


def test_perplexity_and_its_error_by_hand() -> None:
    # mean 2, mean of squares 14/3, so the error is e^2 * sqrt((14/3 - 4) / 2).
    perplexity, stderr = summarize(np.array([1.0, 2.0, 3.0]))
    assert math.isclose(perplexity, math.exp(2), rel_tol=1e-12)
    assert math.isclose(stderr, math.exp(2) * math.sqrt(1 / 3), rel_tol=1e-12)
    perplexity, stderr = summarize(np.full(10, 0.1))
    assert math.isclose(perplexity, math.exp(0.1), rel_tol=1e-12)
    assert stderr < 1e-7


def test_the_error_is_that_of_the_mean_carried_to_the_perplexity() -> None:
    nll = np.random.default_rng(0).gamma(2.0, 1.5, 5000)
    perplexity, stderr = summarize(nll)
    assert math.isclose(stderr, math.exp(nll.mean()) * nll.std(ddof=1) / math.sqrt(len(nll)), rel_tol=1e-9)
    assert math.isclose(perplexity, np.exp(nll.mean()), rel_tol=1e-12)


@pytest.mark.parametrize("log_probabilities", [False, True])
def test_nll_equals_cross_entropy(log_probabilities: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 300, generator=generator) * 5
    targets = torch.randint(0, 300, (50,), generator=generator)
    want = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    given = torch.log_softmax(logits, -1) if log_probabilities else logits
    got = token_nll(given.numpy(), targets.numpy())
    assert got.dtype == np.float64
    assert np.allclose(got, want.numpy(), rtol=1e-5, atol=2e-6)


def test_nll_by_hand() -> None:
    logits = np.log(np.array([[1.0, 1.0, 2.0], [8.0, 1.0, 1.0]], dtype=np.float32))
    got = token_nll(logits, np.array([2, 1], dtype=np.int64))
    assert np.allclose(got, [math.log(2), math.log(10)], rtol=1e-6)
