"""What many tests of formats read: what methods make of a llama of one block; and any tokenizer in GGUF files."""

from functools import partial

import pytest
from gguf_files import take_any_tokenizer


@pytest.fixture(scope="session")
def made(artifact_of, one_block):
    """made("rtn", "4", group_size=64): `one_block` converted, made once."""
    return partial(artifact_of, model=one_block)


@pytest.fixture
def any_tokenizer(monkeypatch, new_cache):
    """Tiny models of every architecture, whose measurements are not kept beyond a test."""
    take_any_tokenizer(monkeypatch)
