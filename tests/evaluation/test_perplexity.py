from dataclasses import replace
from resource import RLIMIT_FSIZE, getrlimit, setrlimit

import numpy as np
import pytest
from edits import flip
from tiny_models import SAMPLE

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine
from quantkit.data.texts import load_text
from quantkit.evaluation import perplexity
from quantkit.evaluation.perplexity import RECORD, ProbeJob, ResumeFile, measure_perplexity
from quantkit.evaluation.protocols import cut
from quantkit.formats.source import open_model
from quantkit.records.recipe import EvaluationSpec
from quantkit.system.progress import Progress


def positions(count):
    found = np.zeros(count, RECORD)
    found["nll"] = np.arange(count) / 10
    return found


def stored(path):
    return ResumeFile(path).read().tolist()


def test_what_is_stored_comes_back_until_it_is_removed(tmp_path):
    path = tmp_path / "deep" / "one.positions"
    file = ResumeFile(path)
    assert stored(path) == []
    file.write([positions(3)])
    assert stored(path) == positions(3).tolist()
    file.write([positions(3), positions(2)])  # too soon: writing takes a small share of the time
    assert stored(path) == positions(3).tolist()
    ResumeFile(path).write([positions(3), positions(2)])
    assert stored(path) == [*positions(3).tolist(), *positions(2).tolist()]
    file.remove()
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("damage", [
    lambda path: flip(path, 0), lambda path: flip(path, -1), lambda path: path.write_bytes(path.read_bytes()[:-8]),
    lambda path: path.write_bytes(b""),
])  # fmt: skip
def test_a_damaged_file_counts_as_none(damage, tmp_path):
    path = tmp_path / "one.positions"
    ResumeFile(path).write([positions(4)])
    damage(path)
    assert stored(path) == []


def test_a_place_that_cannot_be_written_and_a_full_disk_cost_nothing_but_time(tmp_path):
    (tmp_path / "folder.positions").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "one.positions", tmp_path / "folder.positions"):
        file = ResumeFile(path)
        file.write([positions(2)])
        file.remove()
        assert stored(path) == []
    path, (soft, hard) = tmp_path / "one.positions", getrlimit(RLIMIT_FSIZE)
    ResumeFile(path).write([positions(2)])
    setrlimit(RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        ResumeFile(path).write([positions(9)])
    finally:
        setrlimit(RLIMIT_FSIZE, (soft, hard))
    assert stored(path) == positions(2).tolist()


def test_an_interrupted_evaluation_goes_on_at_the_edge_of_a_batch(tiny, tmp_path, monkeypatch):
    """Windows of one batch are computed together again, and the digits are the same."""
    model, text = open_model(str(tiny)), load_text(str(SAMPLE), "evaluation")
    windows = cut(text, model.tokenizer(), "llama.cpp", 64, 40, model.config)  # 32 are computed together
    loaded = find_engine("reference").load(model, LoadSpec(threads=1, n_ctx=64))
    given = []

    class Watched:
        def pieces(self, asked):
            given.append(len(asked))
            return loaded.pieces(asked)

    seen = []
    figures_of = perplexity.figures_of
    monkeypatch.setattr(perplexity, "figures_of", lambda *args, **how: seen.append(args[0]) or figures_of(*args, **how))
    job = ProbeJob(Watched(), model, EvaluationSpec(text=str(SAMPLE)), 1, windows, Progress(), tmp_path / "none")
    whole = measure_perplexity(job)
    for done, computed in ((3, 40), (32, 8), (35, 40), (40, 0)):  # what ends within a batch is not ours
        path = tmp_path / f"{done}.positions"
        ResumeFile(path).write([seen[0][: 31 * done]])
        again = measure_perplexity(replace(job, resume=path))
        assert sum(given[1:]) == computed
        del given[1:]
        assert seen.pop().tobytes() == seen[0].tobytes()
        assert [(one.name, one.value, one.sums) for one in again] == [(one.name, one.value, one.sums) for one in whole]
        assert not path.exists()
