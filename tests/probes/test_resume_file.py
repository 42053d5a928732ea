"""Windows of an interrupted evaluation."""

from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit

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


@pytest.mark.parametrize("place", [0, 100, 3 * RECORD.itemsize + 1, 3 * RECORD.itemsize + 10, -1])
def test_damaged_windows_and_all_behind_them_are_judged_again(place: int, tmp_path: Path) -> None:
    path = tmp_path / "one.positions"
    kept = ResumeFile(path, SIZES)
    for number in range(3):
        kept.add(window(number))
    kept.close()
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    whole = 2 if place == -1 else 0 if place < 3 * RECORD.itemsize + 4 else 1
    again = ResumeFile(path, SIZES)
    assert [w.tolist() for w in again.windows] == [window(n).tolist() for n in range(whole)]
    for number in range(whole, 3):
        again.add(window(number))
    again.close()
    last = ResumeFile(path, SIZES)
    assert len(last.windows) == 3
    last.close()


def test_zeros_that_a_crash_left_are_no_windows(tmp_path: Path) -> None:
    path = tmp_path / "one.positions"
    path.write_bytes(bytes(1000))
    kept = ResumeFile(path, SIZES)
    kept.close()
    assert kept.windows == []


def test_a_place_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.positions").mkdir()
    for path in (tmp_path / "file" / "one.positions", tmp_path / "folder.positions"):
        kept = ResumeFile(path, SIZES)
        kept.add(window(0))
        kept.forget()
        kept.close()
        assert len(kept.windows) == 1


def test_a_disk_that_is_full_ends_the_keeping_and_not_the_work(tmp_path: Path) -> None:
    path, (soft, hard) = tmp_path / "one.positions", getrlimit(RLIMIT_FSIZE)
    kept = ResumeFile(path, SIZES)
    kept.add(window(0))
    setrlimit(RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        kept.add(window(1))
    finally:
        setrlimit(RLIMIT_FSIZE, (soft, hard))
    kept.add(window(2))
    kept.close()
    assert len(kept.windows) == 3
    again = ResumeFile(path, SIZES)
    again.close()
    assert [w.tolist() for w in again.windows] == [window(0).tolist()]


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
