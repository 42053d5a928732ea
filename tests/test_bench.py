"""The deliberate errors of bench/mutants still fit the code that they are put into."""

from pathlib import Path

import pytest

from bench.mutants import ENTRIES, Mutant, read

ROOT = Path(__file__).parents[1]
MUTANTS = read(ENTRIES)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{mutant.group}-{i}" for i, mutant in enumerate(MUTANTS)])
def test_a_deliberate_error_has_its_text_and_its_tests(mutant: Mutant) -> None:
    assert mutant.count(ROOT) == 1, mutant.kind
    for test in mutant.tests:
        assert (ROOT / test.partition("::")[0]).exists(), test
