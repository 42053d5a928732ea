from dataclasses import replace
from resource import RLIMIT_FSIZE, getrlimit, setrlimit

import numpy as np
import pytest
from edits import flip
from tiny_models import SAMPLE

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.probe import ProbeJob
from quantkit.contracts.registry import find_engine
from quantkit.data.texts import load_text
from quantkit.evaluation.protocols import cut
from quantkit.formats.source import open_model
from quantkit.probes._resume import ResumeFile
from quantkit.probes._scores import RECORD
from quantkit.probes.perplexity import PROBE
from quantkit.progress import Progress
from quantkit.recipe import EvaluationSpec

SIZES = [3, 2, 4]


def window(number):
    found = np.zeros(SIZES[number], RECORD)
    found["nll"] = number + np.arange(SIZES[number]) / 10
    return found


def keep(path, *numbers):
    """Add windows to a file; all that it has then."""
    kept = ResumeFile(path, SIZES)
    for number in numbers:
        kept.add(window(number))
    kept.close()
    return [found.tolist() for found in kept.windows]


def windows(count):
    return [window(number).tolist() for number in range(count)]


@pytest.mark.parametrize("torn", [0, RECORD.itemsize + 5])
def test_whole_windows_come_back_and_a_torn_one_does_not(torn, tmp_path):
    path = tmp_path / "deep" / "one.positions"
    assert keep(path) == []
    keep(path, 0, 1)
    with path.open("ab") as file:
        file.write(b"x" * torn)
    assert keep(path) == windows(2)
    keep(path, 2)
    last = ResumeFile(path, SIZES)
    assert [found.tolist() for found in last.windows] == windows(3)
    last.forget()
    last.close()
    assert not path.exists()


@pytest.mark.parametrize(("place", "whole"), [(0, 0), (3 * RECORD.itemsize + 10, 1), (-1, 2)])
def test_damaged_windows_and_all_behind_them_are_judged_again(place, whole, tmp_path):
    path = tmp_path / "one.positions"
    keep(path, 0, 1, 2)
    flip(path, place)
    assert keep(path) == windows(whole)
    keep(path, *range(whole, 3))
    assert keep(path) == windows(3)


def test_without_a_place_that_can_be_written_nothing_is_kept(tmp_path):
    (tmp_path / "folder.positions").mkdir()
    for path in (None, tmp_path / "folder.positions"):
        kept = ResumeFile(path, SIZES)
        kept.add(window(0))
        kept.forget()
        kept.close()
        assert len(kept.windows) == 1


def test_a_disk_that_is_full_ends_the_keeping_and_not_the_work(tmp_path):
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
    assert keep(path) == windows(1)


def test_a_file_in_use_is_left_alone(tmp_path):
    path = tmp_path / "one.positions"
    first = ResumeFile(path, SIZES)
    first.add(window(0))
    other = ResumeFile(path, SIZES)
    other.add(window(0))
    other.add(window(1))
    other.forget()
    other.close()
    first.close()
    assert keep(path) == windows(1)


def test_an_interrupted_judgement_goes_on_with_whole_batches(tiny, tmp_path, monkeypatch):
    """Windows of one batch are computed together again, those that are there are kept, and the digits are the same."""
    model, text = open_model(str(tiny)), load_text(str(SAMPLE), "evaluation")
    windows = cut(text, model.tokenizer(), "llama.cpp", 64, 40, model.config)  # 32 are computed together
    loaded = find_engine("reference").load(model, LoadSpec(threads=1, n_ctx=64))
    given = []

    class Watched:
        def pieces(self, asked):
            given.append(len(asked))
            return loaded.pieces(asked)

    seen = []
    monkeypatch.setattr(ResumeFile, "forget", lambda kept: seen.append(np.concatenate(kept.windows)))
    job = ProbeJob(Watched(), model, EvaluationSpec(text=str(SAMPLE)), 1, windows, Progress())
    whole = PROBE.run(job)
    for done, computed in ((3, 40), (32, 8), (35, 8)):
        path = tmp_path / f"{done}.positions"
        kept = ResumeFile(path, [31] * 40)
        for number in range(done):
            kept.add(seen[0][31 * number : 31 * (number + 1)])
        kept.close()
        again = PROBE.run(replace(job, resume=path))
        assert given.pop() == computed
        assert seen.pop().tobytes() == seen[0].tobytes()
        assert [(one.name, one.value, one.sums) for one in again] == [(one.name, one.value, one.sums) for one in whole]
