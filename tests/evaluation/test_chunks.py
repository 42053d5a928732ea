"""Judging in chunks: the digits of a judgement without them, what is used again, and what is never put together."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_models import SAMPLE

from quantkit import evaluate
from quantkit.artifact import Artifact
from quantkit.errors import ReportError
from quantkit.evaluation.chunks import judge
from quantkit.evaluation.chunks.judge import evaluate_in_chunks
from quantkit.evaluation.chunks.records import Chunk
from quantkit.recipe import EngineSpec
from quantkit.report.records import Report

# Three batches: 32 windows of 64 tokens are computed together, and a batch has 992 positions, which is no whole number
# of the blocks of 256 that go through the source's output layer.
SETTINGS: dict[str, Any] = {"text": str(SAMPLE), "n_ctx": 64, "limit": 80, "threads": (1,)}
OF_THIS_RUN = ("tokens_per_second", "peak_rss_bytes")


@dataclass(frozen=True)
class Judged:
    """An artifact, its source, its report without chunks, and the cache and folder of three chunks of it."""

    artifact: Path
    source: Path
    whole: Report
    cache: Path
    chunks: Path

    def judge(self, folder: Path, chunk: Chunk | None = None) -> Any:
        engine = EngineSpec(engine="reference")
        return evaluate_in_chunks(self.artifact, folder, chunk, engine=engine, source=self.source, **SETTINGS)


@pytest.fixture(scope="module")
def judged(tiny: Path, artifact_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    place = tmp_path_factory.mktemp("chunks")
    made: Artifact = artifact_of("rtn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(place / "whole"))
        whole = evaluate(made, ("perplexity",), engine="reference", source=tiny, **SETTINGS)
        patch.setenv("QUANTKIT_CACHE", str(place / "cache"))
        judged = Judged(made.folder, tiny, whole, place / "cache", place / "three")
        for index in (2, 0, 1):
            judged.judge(judged.chunks, Chunk(index, 3))
    return judged


@pytest.fixture
def copy(judged: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the three chunks, with a copy of the cache that they have made; no process may be started."""

    def no_child(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setenv("QUANTKIT_CACHE", str(shutil.copytree(judged.cache, tmp_path / "cache")))
    monkeypatch.setattr(judge, "run_child", no_child)
    return Path(shutil.copytree(judged.chunks, tmp_path / "three"))


def figures(report: Report) -> Any:
    """All measurements, but for how long they took."""
    return [
        one.model_copy(update={"details": {k: v for k, v in one.details.items() if k not in OF_THIS_RUN}})
        for one in report.measurements
    ]


def test_three_chunks_have_the_digits_of_the_whole(judged: Judged, copy: Path) -> None:
    used_again = judged.judge(copy, Chunk(1, 3))
    assert (used_again.first, used_again.stop) == (32, 64)
    merged = judged.judge(copy)
    assert figures(merged) == figures(judged.whole)
    assert len(merged.find("perplexity").sums) == len(merged.find("kld").sums) == 80
    assert merged.baseline == judged.whole.baseline
    assert merged.baseline.noise > 0
    for name in ("model", "text", "windows", "engine", "hardware", "settings", "notes", "fingerprint"):
        assert getattr(merged, name) == getattr(judged.whole, name), name


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("decides", "model", "digest"), "0" * 64, r"model\.digest"),
        (("decides", "hardware", "cpu"), "another", r"hardware\.cpu is"),
        (("baseline",), "0" * 64, "against another baseline"),
        (("sha256",), "0" * 64, "damaged"),
    ],
    ids=["bytes", "machine", "source", "positions"],
)
def test_unlike_and_damaged_chunks_are_refused_and_not_used_again(
    keys: tuple[str, ...], value: str, said: str, judged: Judged, copy: Path
) -> None:
    path = copy / "chunk-1-of-3.json"
    record = values = json.loads(path.read_text())
    for key in keys[:-1]:
        values = values[key]
    values[keys[-1]] = value
    path.write_text(json.dumps(record))
    with pytest.raises(ReportError, match=said):
        judged.judge(copy)
    with pytest.raises(AssertionError, match="process was started"):
        judged.judge(copy, Chunk(1, 3))
