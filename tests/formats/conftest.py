"""What many tests of formats read: a llama of one block, and what methods make of it."""

from functools import partial

import pytest


@pytest.fixture(scope="session")
def one_block(tiny_with):
    return tiny_with(num_hidden_layers=1)


@pytest.fixture(scope="session")
def made(artifact_of, one_block):
    """made("rtn", "4", group_size=64): `one_block` converted, made once."""
    return partial(artifact_of, model=one_block)
