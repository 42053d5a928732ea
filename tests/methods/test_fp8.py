"""FP8: the options reach the file, and what a searched scale is worth in a whole model."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_llama import LINEARS
from trials import read_back

from quantkit.artifact import Artifact, WeightError
from quantkit.numerics.scaled.weight import InputRounding, ScaledWeight


@pytest.mark.parametrize(("granularity", "block"), [("channel", None), ("block", (128, 128))])
def test_options_reach_the_file_and_a_search_pays(
    granularity: str,
    block: tuple[int, int] | None,
    artifact_of: Callable[..., Artifact],
    tiny_with: Callable[..., Path],
) -> None:
    errors: list[WeightError] = []
    for search in (True, False):
        model = tiny_with(num_hidden_layers=1)
        artifact = artifact_of("fp8", "8", model=model, granularity=granularity, scale_search=search)
        assert artifact.manifest.tensor_types == {"float8": 7, "bfloat16": 4}
        for name in LINEARS[:7]:
            layer = read_back(artifact)[name]
            assert isinstance(layer, ScaledWeight)
            assert layer.block == (block or (1, layer.shape[1]))
            assert layer.inputs == InputRounding("float8", block and block[1])
        assert artifact.manifest.weight_error is not None
        errors.append(artifact.manifest.weight_error)
    assert errors[0].mean < 0.99 * errors[1].mean
    assert errors[1].mean < 0.03
