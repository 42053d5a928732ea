"""FP8: the options reach the file, and what a searched scale is worth in a whole model."""

from pathlib import Path

import pytest
from tiny_llama import LINEARS, converted
from trials import read_back

from quantkit.artifact import WeightError
from quantkit.numerics.scaled.weight import InputRounding, ScaledWeight


@pytest.mark.parametrize(("granularity", "block"), [("channel", None), ("block", (128, 128))])
def test_options_reach_the_file_and_a_search_pays(
    granularity: str, block: tuple[int, int] | None, tiny_llama: Path, tmp_path: Path
) -> None:
    errors: list[WeightError] = []
    for search in (True, False):
        artifact = converted(
            tiny_llama, tmp_path / str(search), "fp8", "8", granularity=granularity, scale_search=search
        )
        assert artifact.manifest.tensor_types == {"float8": len(LINEARS), "bfloat16": 8}
        for name in LINEARS:
            layer = read_back(artifact)[name]
            assert isinstance(layer, ScaledWeight)
            assert layer.block == (block or (1, layer.shape[1]))
            assert layer.inputs == InputRounding("float8", block and block[1])
        assert artifact.manifest.weight_error is not None
        errors.append(artifact.manifest.weight_error)
    assert errors[0].mean < 0.99 * errors[1].mean
    assert errors[1].mean < 0.03
