import ast

import pytest
import torch
from tiny_llama import converted
from trials import dense_values

from bench.mutants import mutants_of
from bench.readers import read_values


@pytest.mark.parametrize("kind", ["compressed-tensors", "gptq"])
def test_values_of_mixed_bits_are_those_that_quantkit_reads(kind, tiny_llama, tmp_path):
    bits = {".": 4, "layers.0.*o_proj": 8, "layers.1.mlp": 2, "down_proj": 3}
    made = converted(tiny_llama, tmp_path / "out", "rtn", "auto", format=kind, group_size=64, layer_bits=bits)
    want, got = dense_values(made), dict(read_values(made.folder))
    assert set(made.manifest.options["layer_bits"].values()) == {2, 3, 4, 8}
    for name, value in want.items():
        assert torch.equal(got[name].float(), value.float()), name


def test_a_function_has_these_mutations():
    text = """
def clip(x, low=0):
    \"\"\"Not 1 of these.\"\"\"
    if not x < low and flag:
        log(x)
    if x > 3:
        raise ValueError(f"{x} > 3 or {1 + 1}")
    return x * 2 if x else low
"""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    changed = [f"{what}: {ast.unparse(new).splitlines()[0]}" for _, new, what in mutants_of(function)]
    assert sorted(changed) == [
        "2 becomes 3: return x * 3 if x else low",
        "3 becomes 4: if x > 4:",
        "And becomes Or: if not x < low or flag:",
        "Gt becomes GtE: if x >= 3:",
        "Lt becomes LtE: if not x <= low and flag:",
        "Mult becomes Div: return x / 2 if x else low",
        "a call is dropped: pass",
        "not is dropped: if not not x < low and flag:",
        "the branches of an expression change places: return low if x else x * 2",
    ]
