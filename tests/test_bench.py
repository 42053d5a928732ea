"""The deliberate errors of bench/mutants still fit their code, and bench/readers reads layers of several bits."""

from pathlib import Path

import pytest
import torch
from tiny_llama import converted
from trials import dense_values

from bench.mutants import ENTRIES, Mutant, read
from bench.readers import read_values

ROOT = Path(__file__).parents[1]
MUTANTS = read(ENTRIES)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{mutant.group}-{i}" for i, mutant in enumerate(MUTANTS)])
def test_a_deliberate_error_has_its_text_and_its_tests(mutant: Mutant) -> None:
    assert mutant.count(ROOT) == 1, mutant.kind
    for test in mutant.tests:
        assert (ROOT / test.partition("::")[0]).exists(), test


@pytest.mark.parametrize("kind", ["compressed-tensors", "gptq"])
def test_values_of_mixed_bits_are_those_that_quantkit_reads(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    bits = {".": 4, "layers.0.*o_proj": 8, "layers.1.mlp": 2, "down_proj": 3}
    made = converted(tiny_llama, tmp_path / "out", "rtn", "auto", format=kind, group_size=64, layer_bits=bits)
    want, got = dense_values(made), dict(read_values(made.folder))
    assert set(made.manifest.options["layer_bits"].values()) == {2, 3, 4, 8}
    for name, value in want.items():
        assert torch.equal(got[name].float(), value.float()), name
