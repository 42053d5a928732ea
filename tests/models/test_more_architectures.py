"""Architectures that no code knows of: the walk, the artifacts and the scalings of each, as those of the others.

Each takes 1 to 10 CPU seconds, so they run only when they are asked for (`pytest -m slow`).
"""

from pathlib import Path

import pytest
import test_architectures as plain
from tiny_architectures import ARCHITECTURES, LAYERS, Tiny, save_architecture
from tiny_llama import converted
from tiny_more import MORE, settings_of
from transformers import CONFIG_MAPPING

from quantkit.contracts.proven import PROVEN


def test_they_are_promised() -> None:
    assert MORE.keys() <= PROVEN
    assert not MORE.keys() & {tiny.kind for tiny in ARCHITECTURES.values()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_an_architecture_is_what_the_whole_model_computes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Tiny(CONFIG_MAPPING[kind].__name__, MORE[kind] / LAYERS, settings_of(kind))
    monkeypatch.setitem(ARCHITECTURES, kind, tiny)
    folder = save_architecture(tmp_path / kind, kind)
    with monkeypatch.context() as exactly:
        plain.test_block_inputs_are_the_hidden_states_of_the_whole_model(kind, lambda _: folder, exactly)
    for method, options in (("gptq", {}), ("rtn", {}), ("awq", {"n_grid": 2})):
        artifact = converted(folder, tmp_path / method, method, group_size=16, **options)
        plain.proven(artifact, folder, tmp_path / f"{method}-plain", tiny.linears)
    plain.test_scales_without_rounding_leave_the_model_as_it_is(kind, lambda _: folder)
