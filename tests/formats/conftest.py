"""What many tests of formats read: a llama of one block, and what methods make of it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from quantkit.artifact import Artifact


@pytest.fixture(scope="session")
def one_block(tiny_with: Callable[..., Path]) -> Path:
    return tiny_with(num_hidden_layers=1)


@pytest.fixture(scope="session")
def made(artifact_of: Callable[..., Artifact], one_block: Path) -> Callable[..., Artifact]:
    """made("rtn", "4", group_size=64): `one_block` converted, made once."""
    return partial(artifact_of, model=one_block)
