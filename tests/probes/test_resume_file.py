"""Windows of an interrupted evaluation."""

from pathlib import Path

import numpy as np
import pytest

from quantkit.probes._resume import ResumeFile
from quantkit.probes._scores import RECORD, Positions

SIZES = [3, 2, 4]


def window(number: int) -> Positions:
    found = np.zeros(SIZES[number], RECORD)
    found["nll"] = number + np.arange(SIZES[number]) / 10
    return found


@pytest.mark.parametrize("torn", [0, 1, RECORD.itemsize + 5])
def test_whole_windows_come_back_and_a_torn_one_does_not(torn: int, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "one.positions"
    first = ResumeFile(path, SIZES)
    assert first.windows == []
    first.add(window(0))
    first.add(window(1))
    first.close()
    with path.open("ab") as file:
        file.write(b"x" * torn)
    again = ResumeFile(path, SIZES)
    assert [w.tolist() for w in again.windows] == [window(0).tolist(), window(1).tolist()]
    again.add(window(2))
    again.close()
    last = ResumeFile(path, SIZES)
    assert [w.tolist() for w in last.windows] == [window(n).tolist() for n in range(3)]
    last.forget()
    last.close()
    assert not path.exists()


def test_a_file_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "one.positions"
    first = ResumeFile(path, SIZES)
    first.add(window(0))
    other = ResumeFile(path, SIZES)
    other.add(window(0))
    other.add(window(1))
    other.forget()
    other.close()
    first.close()
    again = ResumeFile(path, SIZES)
    again.close()
    assert len(again.windows) == 1


def test_without_a_place_nothing_is_kept(tmp_path: Path) -> None:
    kept = ResumeFile(None, SIZES)
    kept.add(window(0))
    kept.forget()
    kept.close()
    assert len(kept.windows) == 1
    assert list(tmp_path.iterdir()) == []
