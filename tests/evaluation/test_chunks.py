"""Judging in chunks: the digits of a judgement without them, what is used again, and what is never put together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tiny_models import SAMPLE, quantkit, save_tiny

from quantkit import convert, evaluate
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.probe import ProbeJob
from quantkit.contracts.registry import find_engine
from quantkit.contracts.windows import Window, alike, batch_edge, chunk_of
from quantkit.data.texts import load_text
from quantkit.errors import RecipeError, ReportError
from quantkit.evaluation.baseline import BaselineFiles
from quantkit.evaluation.chunks import judge
from quantkit.evaluation.chunks.judge import evaluate_in_chunks
from quantkit.evaluation.chunks.records import Chunk, ChunkEntry, parse_chunk
from quantkit.evaluation.protocols import cut
from quantkit.formats.source import open_model
from quantkit.probes._resume import ResumeFile
from quantkit.probes.perplexity import PROBE
from quantkit.progress import Progress
from quantkit.recipe import EngineSpec, EvaluationSpec, WalkSpec
from quantkit.report.records import Report
from quantkit.system.processor import usable_cores

# Three batches: 32 windows of 64 tokens are computed together, and a batch has 992 positions, which is no whole number
# of the blocks of 256 that go through the source's output layer.
SETTINGS: dict[str, Any] = {"text": str(SAMPLE), "n_ctx": 64, "limit": 80, "threads": (1,)}
FLAGS = ["--text", SAMPLE, "--n-ctx", 64, "--limit", 80, "--threads", 1, "--engine", "reference"]
OF_THIS_RUN = ("tokens_per_second", "peak_rss_bytes")


@dataclass(frozen=True)
class Judged:
    """An artifact, its source, its report without chunks, and the cache and folder of three chunks of it."""

    artifact: Path
    source: Path
    whole: Report
    cache: Path
    chunks: Path

    def judge(self, folder: Path, chunk: Chunk | None = None, **changes: Any) -> Any:
        return evaluate_in_chunks(
            self.artifact, folder, chunk, engine=EngineSpec(engine="reference"), source=self.source,
            **{**SETTINGS, **changes},
        )  # fmt: skip


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    place = tmp_path_factory.mktemp("chunks")
    source = save_tiny(place / "tiny")
    artifact = convert(str(source), "rtn", out=place / "out").folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(place / "whole"))
        whole = evaluate(artifact, ("perplexity",), engine="reference", source=source, **SETTINGS)
        patch.setenv("QUANTKIT_CACHE", str(place / "cache"))
        made = Judged(artifact, source, whole, place / "cache", place / "three")
        for index in (2, 0, 1):
            made.judge(made.chunks, Chunk(index, 3))
    return made


@pytest.fixture
def copy(judged: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the three chunks, with a copy of the cache that they have made."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(shutil.copytree(judged.cache, tmp_path / "cache")))
    return Path(shutil.copytree(judged.chunks, tmp_path / "three"))


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def figures(report: Report) -> Any:
    """All measurements, but for how long they took."""
    return [
        one.model_copy(update={"details": {k: v for k, v in one.details.items() if k not in OF_THIS_RUN}})
        for one in report.measurements
    ]


def no_child(*_: object) -> None:
    raise AssertionError("a process was started")


def test_three_chunks_have_the_digits_of_the_whole(judged: Judged, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "run_child", no_child)  # what the chunks left is enough
    merged = judged.judge(copy)
    assert figures(merged) == figures(judged.whole)
    assert len(merged.find("perplexity").sums) == len(merged.find("kld").sums) == 80
    assert merged.baseline == judged.whole.baseline
    assert merged.baseline.noise > 0
    for name in ("model", "text", "windows", "engine", "hardware", "settings", "notes", "fingerprint"):
        assert getattr(merged, name) == getattr(judged.whole, name), name
    assert judged.judge(copy).seal == merged.seal  # again, now with the whole baseline


def test_two_chunks_of_a_whole_baseline_have_them_too(
    judged: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the parts of three chunks and of two can be mixed."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(judged.cache.parent / "whole"))
    folder = tmp_path / "deep" / "two"
    entry = judged.judge(folder, Chunk(0, 2))
    assert (entry.first, entry.stop, entry.positions) == (0, 32, 32 * 31)
    shutil.copytree(judged.chunks, folder, dirs_exist_ok=True)
    for name in ("chunk-0-of-3.json", "chunk-0-of-3.npy"):
        (folder / name).unlink()
    assert figures(judged.judge(folder)) == figures(judged.whole)


def test_a_chunk_that_is_there_is_used_again(judged: Judged, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "run_child", no_child)
    before = (copy / "chunk-1-of-3.json").read_bytes()
    entry = judged.judge(copy, Chunk(1, 3))
    assert isinstance(entry, ChunkEntry)
    assert (entry.first, entry.stop) == (32, 64)
    assert (copy / "chunk-1-of-3.json").read_bytes() == before


def set_at(*keys: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: Any) -> None:
        for key in keys[:-1]:
            values = values[key]
        assert values[keys[-1]] != value
        values[keys[-1]] = value

    return change


# How a chunk may have been judged otherwise: by what its record says, and how a merge names it.
OTHERWISE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "bytes": (set_at("decides", "model", "digest", value="0" * 64), r"model\.digest"),
    "text": (set_at("decides", "text", 1, value="0" * 64), "text is"),
    "tokens": (set_at("decides", "windows", "tokens_sha256", value="0" * 64), r"windows\.tokens_sha256"),
    "protocol": (set_at("decides", "windows", "protocol", value="papers"), r"windows\.protocol is 'papers' there"),
    "windows": (set_at("decides", "settings", "limit", value=81), r"settings\.limit is 81 there and 80 here"),
    "threads": (set_at("decides", "settings", "threads", value=[7]), r"settings\.threads is 7 there and 1 here"),
    "engine version": (set_at("decides", "engine", 1, value="0.0.1"), "engine is '0.0.1' there"),
    "code": (set_at("decides", "code", value="0" * 64), "code is"),
    "machine": (set_at("decides", "hardware", "cpu", value="another"), r"hardware\.cpu is"),
    "source": (set_at("baseline", value="0" * 64), "against another baseline"),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_unlike_chunks_are_refused_and_not_used_again(
    what: str, judged: Judged, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, said = OTHERWISE[what]
    edited(copy / "chunk-1-of-3.json", change)
    with pytest.raises(ReportError, match=said) as refusal:
        judged.judge(copy)
    assert "chunk-1-of-3.json" in str(refusal.value)
    monkeypatch.setattr(judge, "run_child", no_child)
    with pytest.raises(AssertionError, match="process was started"):
        judged.judge(copy, Chunk(1, 3))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"protocol": "papers"}, "windows.protocol|settings.protocol"),
        ({"limit": 81}, "windows|settings.limit"),
        ({"n_ctx": 65}, "windows|settings.n_ctx"),
        ({"threads": (2,)}, "settings.threads"),
        ({"divergence": False}, "settings.divergence"),
    ],
)
def test_a_merge_that_asks_for_something_else_is_refused(
    changes: dict[str, Any], said: str, judged: Judged, copy: Path
) -> None:
    if "threads" in changes and usable_cores() < 2:
        pytest.skip("one core")
    with pytest.raises(ReportError, match=f"was judged otherwise: ({said})"):
        judged.judge(copy, **changes)


def test_the_number_of_cores_decides_nothing_where_threads_are_told(judged: Judged, copy: Path) -> None:
    for index in range(3):
        edited(copy / f"chunk-{index}-of-3.json", set_at("decides", "hardware", "cores", value=64 + index))
    assert figures(judged.judge(copy)) == figures(judged.whole)


def test_what_a_machine_chooses_by_its_cores_and_memory_is_as_in_the_chunks(judged: Judged, copy: Path) -> None:
    for index in range(3):
        for change in (
            set_at("decides", "engine", 2, value="bfloat16"),  # a walk names the type that it computes in
            set_at("decides", "engine", 4, value=True),
            set_at("decides", "settings", "threads", value=[1, 64]),
        ):
            edited(copy / f"chunk-{index}-of-3.json", change)
    merged = judged.judge(copy, threads=())
    assert figures(merged) == figures(judged.whole)
    assert merged.settings.threads == (1, 64)
    with pytest.raises(ReportError, match="engine is 'bfloat16' there and None here"):
        judged.judge(copy, threads=(), memory=WalkSpec(walk=False))
    with pytest.raises(ReportError, match="threads"):
        judged.judge(copy)


def test_another_machine_merges(judged: Judged, copy: Path) -> None:
    for index in range(3):
        edited(copy / f"chunk-{index}-of-3.json", set_at("decides", "hardware", "cpu", value="another"))
    merged = judged.judge(copy)
    assert figures(merged) == figures(judged.whole)
    assert merged.fingerprint != judged.whole.fingerprint


@pytest.mark.parametrize(
    "damage", ["lost positions", "changed positions", "short record", "other name", "other windows"]
)
def test_damaged_chunks_are_told_and_judged_again(
    damage: str, judged: Judged, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, data = copy / "chunk-1-of-3.json", copy / "chunk-1-of-3.npy"
    if damage == "lost positions":
        data.unlink()
    elif damage == "changed positions":
        data.write_bytes(data.read_bytes()[:-1] + b"?")
    elif damage == "short record":
        record.write_text(record.read_text()[:-20])
    elif damage == "other name":
        record.rename(copy / "chunk-1-of-4.json")
    else:
        edited(record, lambda values: values.update(first=33, stop=65))
    with pytest.raises(ReportError, match="chunk-1-of-"):
        judged.judge(copy)
    if damage != "other windows":
        monkeypatch.setattr(judge, "run_child", no_child)
        with pytest.raises(AssertionError, match="process was started"):
            judged.judge(copy, Chunk(1, 3))


@pytest.mark.parametrize(
    ("gone", "lacks"), [((0,), "0 to 31"), ((1,), "32 to 63"), ((2,), "64 to 79"), ((1, 2), "32 to 79")]
)
def test_missing_chunks_are_told(gone: tuple[int, ...], lacks: str, judged: Judged, copy: Path) -> None:
    for index in gone:
        (copy / f"chunk-{index}-of-3.json").unlink()
    with pytest.raises(ReportError, match=rf"lacks the windows {lacks} of 80; it has the chunks"):
        judged.judge(copy)


def test_an_empty_folder_and_chunks_without_windows(judged: Judged, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="holds no chunks"):
        judged.judge(tmp_path / "nowhere")
    with pytest.raises(RecipeError, match="windows for 3 chunks"):
        judged.judge(tmp_path / "new", Chunk(0, 4))
    assert not (tmp_path / "new").exists()
    with pytest.raises(RecipeError, match="the probe size is not measured in chunks"):
        judged.judge(tmp_path / "new", Chunk(0, 2), probes=("size",))


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "0/0", "1/2/3", "a/b", "0/999999999", "0 / 2", "٠/٢"])
def test_what_is_no_chunk(text: str) -> None:
    with pytest.raises(RecipeError, match="is no chunk"):
        parse_chunk(text)


def test_a_chunk_by_its_text() -> None:
    assert [parse_chunk(f"{index}/3") for index in range(3)] == [Chunk(index, 3) for index in range(3)]


def test_on_the_command_line(judged: Judged, copy: Path, tmp_path: Path) -> None:
    command = partial(quantkit, "eval-ppl", judged.artifact, *FLAGS, "--source", judged.source)
    ended = command("--chunks", copy, "--chunk", "1/3", "--json", tmp_path / "chunk.json")
    assert ended.code == 0, ended.err
    assert "chunk-1-of-3.json: windows 32 to 63, 992 targets, mean negative log-likelihood 6." in ended.out
    assert json.loads((tmp_path / "chunk.json").read_text()) == json.loads((copy / "chunk-1-of-3.json").read_text())
    ended = command("--chunks", copy, "--json", tmp_path / "all.json")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == judged.whole.quality()
    assert figures(Report.model_validate_json((tmp_path / "all.json").read_text())) == figures(judged.whole)
    for flags, said in (
        (["--chunk", "0/3"], "--chunks FOLDER"),
        (["--chunks", copy, "--cross-check"], "leave --chunks out"),
        (["--chunks", copy, "--chunk", "0/3", "--card"], "--card is for all windows"),
    ):
        ended = command(*flags)
        assert ended.code == 2
        assert said in ended.err


def windows_of(lengths: list[int]) -> list[Window]:
    return [Window(np.full(n, number), 0, np.zeros(1, np.int64)) for number, n in enumerate(lengths)]


def test_chunks_are_whole_batches_and_all_windows() -> None:
    draw = Random(0)
    for _ in range(50):
        lengths = [draw.choice([64, 64, 700, 2048, 4000]) for _ in range(draw.randrange(1, 90))]
        windows = windows_of(lengths)
        batches = [[int(window.ids[0]) for window in batch] for batch in alike(windows)]
        for count in (1, 2, 3, 7):
            parts = [chunk_of(windows, index, count) for index in range(count)]
            assert [stop for _, stop in parts[:-1]] == [first for first, _ in parts[1:]]
            assert (parts[0][0], parts[-1][1]) == (0, len(windows))
            again = [[int(w.ids[0]) for w in batch] for a, b in parts for batch in alike(windows[a:b])]
            assert again == batches
        at = draw.randrange(len(windows))
        edge = batch_edge(windows, at)
        assert any(batch[0] == edge and at in batch for batch in batches)


def test_an_interrupted_judgement_goes_on_with_whole_batches(judged: Judged, tmp_path: Path) -> None:
    """Windows of one batch are computed together again, those that are there are kept, and the digits are the same."""
    model = open_model(judged.artifact)
    spec = EvaluationSpec(**{**SETTINGS, "limit": 40})
    windows = cut(load_text(spec.text, "evaluation"), model.tokenizer(), "llama.cpp", 64, 40, model.config)
    loaded = find_engine("reference").load(model, LoadSpec(threads=1, n_ctx=64))
    given: list[int] = []

    class Watched:
        def pieces(self, asked: Sequence[Window]) -> Iterator[np.ndarray]:
            given.append(len(asked))
            return loaded.pieces(asked)

    job = ProbeJob(Watched(), model, spec, 1, windows, Progress(), save=tmp_path / "all.npy")  # type: ignore[arg-type]
    whole = PROBE.run(job)
    every = np.load(tmp_path / "all.npy")
    for done, computed in ((3, 40), (32, 8), (35, 8)):
        kept = ResumeFile(tmp_path / "one.positions", [31] * 40)
        for number in range(done):
            kept.add(every[31 * number : 31 * (number + 1)])
        kept.close()
        again = PROBE.run(replace(job, resume=tmp_path / "one.positions"))
        assert given.pop() == computed
        assert np.load(tmp_path / "all.npy").tobytes() == every.tobytes()
        assert [(one.name, one.value, one.sums) for one in again] == [(one.name, one.value, one.sums) for one in whole]


def test_a_part_of_a_baseline_says_so_in_the_cache(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(judged.cache))
    parts = {path.stem for path in (judged.cache / "baselines").glob("*.json")}
    assert {name.partition(".")[2] for name in parts} >= {"0-32", "32-64", "64-80"}
    facts = [BaselineFiles(name).read_facts() for name in sorted(parts) if "." in name]
    assert [one.windows for one in facts if one is not None] == [32, 32, 16]
