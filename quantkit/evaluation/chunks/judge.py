"""Judge one chunk of the windows, and merge what all chunks left, to the digits of a judgement without chunks.

A chunk is whole batches of windows, so each window is computed as ever. Of the source's baseline a chunk makes the part
that it needs; the parts become the whole one when chunks are merged. Figures come of all positions in the order of
their windows, whoever judged them, and however many chunks there were.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.artifact import Artifact
from quantkit.contracts.model import Model
from quantkit.contracts.windows import Cut, chunk_of
from quantkit.data.texts import Text, load_text
from quantkit.errors import OutputError, RecipeError, ReportError
from quantkit.evaluation.baseline import BaselineFiles, ensure, keep, resume_folder
from quantkit.evaluation.baseline import folder as baselines
from quantkit.evaluation.chunks.records import AGAIN, Chunk, ChunkEntry, chunks_in, difference, kept_chunk, leave
from quantkit.evaluation.engine_choice import ChosenEngine, choose
from quantkit.evaluation.evaluate import (
    WALK,
    Judgement,
    baseline_request,
    fingerprint_of,
    open_judged,
    prepare,
    reported,
)
from quantkit.evaluation.process import run_child
from quantkit.evaluation.request import BaselineName, MeasureRequest, WindowsFile
from quantkit.models.source import Source
from quantkit.probes._scores import RECORD, Positions
from quantkit.probes.perplexity import figures
from quantkit.progress import Progress
from quantkit.recipe import EngineSpec, EvaluationSpec, WalkSpec, parse
from quantkit.report.records import BaselineEntry, EngineEntry, Report, this_machine
from quantkit.system.files import refuse_unwritable, sha256_of
from quantkit.system.temporary import temporary_folder
from quantkit.untrusted import path_of, told

DIGEST_ROWS = 1 << 12  # states that are hashed at a time
ENDLESS_GB = 1e6
PROBES = ("perplexity",)


def judge_chunk(
    model: Model,
    spec: EvaluationSpec,
    text: Text,
    engine: ChosenEngine,
    chunk: Chunk,
    folder: Path,
    progress: Progress,
    source: Source | None = None,
    memory: WalkSpec = WALK,
) -> ChunkEntry:
    """Judge one chunk of a model's windows and leave it in `folder`; see `evaluate_model` for the other arguments.

    A chunk that was left there by the same judgement, on a processor of the same name, is used again; of any other it
    takes the place. Raises RecipeError for a chunk without windows, and for probes other than the perplexity.
    """
    judgement = prepare(model, _of_perplexity(spec), text, engine, source, memory)
    part = chunk_of(judgement.judged.windows, chunk.index, chunk.count)
    if part[0] == part[1]:
        batches = sum(1 for i in range(chunk.count) if len(set(chunk_of(judgement.judged.windows, i, chunk.count))) > 1)
        raise RecipeError(
            f"chunk {chunk} holds no windows: the text has windows for {batches} chunks. Ask for at most so many."
        )
    folder = path_of(folder, OutputError)
    with told(f"the folder {folder} cannot be made", OutputError):
        folder.mkdir(parents=True, exist_ok=True)
    refuse_unwritable(folder, OutputError)
    with temporary_folder() as temp:
        windows = WindowsFile(path=str(temp / "cut.npz"), about=judgement.judged.about)
        judgement.judged.save(Path(windows.path))
        baseline, digest = _baseline_of(judgement, part, windows, temp, progress)
        decides = judgement.decides(None)
        kept = kept_chunk(folder, chunk)
        if kept is not None and kept.baseline == digest and difference(kept.decides, decides) is None:
            progress.say(f"chunk {chunk} is there ({folder / kept.name}.json)")
            return kept
        fingerprint = fingerprint_of({**decides, "baseline": digest})
        request = MeasureRequest(
            load=judgement.engine.load_request(model, max(judgement.spec.threads)),
            windows=windows,
            spec=judgement.spec,
            probes=PROBES,
            baseline=baseline,
            resume=str(resume_folder() / f"{fingerprint[:32]}.{part[0]}-{part[1]}.positions"),
            save=str(temp / "positions.npy"),
            part=part,
        )
        [measured, *_] = (result := run_child(request, temp, progress)).measurements
        saved = temp / "positions.npy"
        positions = np.load(saved, allow_pickle=False)
        tokens = sum(len(window.ids) for window in judgement.judged.windows[part[0] : part[1]])
        rate = float(measured.details.get("tokens_per_second", 0.0))
        used = judgement.engine
        entry = ChunkEntry(
            index=chunk.index,
            count=chunk.count,
            first=part[0],
            stop=part[1],
            positions=len(positions),
            nll=float(positions["nll"].sum()),
            engine=EngineEntry(name=used.name, version=used.version, **result.loaded),
            hardware=this_machine(),
            decides=decides,
            baseline=digest,
            tokens=tokens,
            seconds=tokens / rate if rate else 0.0,
            peak_rss_bytes=int(measured.details["peak_rss_bytes"]),
            sha256=sha256_of(saved),
        )
        leave(folder, entry, saved)
        return entry


def merge_chunks(
    model: Model,
    spec: EvaluationSpec,
    text: Text,
    engine: ChosenEngine,
    folder: Path,
    progress: Progress,
    source: Source | None = None,
    memory: WalkSpec = WALK,
) -> Report:
    """The report of all windows out of the chunks in `folder`; see `evaluate_model` for the other arguments.

    Figures are those of a judgement without chunks, to the last digit; the report is of the machine that judged the
    first chunk. Raises ReportError where chunks are missing or damaged, and where one was judged otherwise than this
    asks for, or on another processor than the first: its message names what differs.
    """
    folder = path_of(folder, ReportError)
    chunks = chunks_in(folder) if folder.is_dir() else []
    if not chunks:
        raise ReportError(f"{folder} holds no chunks. Judge them first, each with --chunk, such as --chunk 0/4.")
    first = chunks[0][0]
    judgement = _like(first, model, _of_perplexity(spec), text, engine, source, memory)
    wanted = {**judgement.decides(None), "hardware": first.decides.get("hardware")}
    for entry, _ in chunks:
        place = folder / f"{entry.name}.json"
        if (found := difference(entry.decides, wanted)) is not None:
            raise ReportError(f"{place} was judged otherwise: {found}. Judge it like the others, or remove it.")
        if (entry.baseline is None) != (judgement.baseline is None):
            raise ReportError(f"{place} was judged otherwise: divergences are measured in one of the two only.")
    every = _all_positions(judgement.judged, chunks, folder)
    facts = _whole_baseline(judgement, chunks, folder, progress)
    decides = {**first.decides, "baseline": None if facts is None else facts.model_dump(mode="json")}
    seconds = sum(entry.seconds for entry, _ in chunks)
    speed = {"tokens_per_second": sum(entry.tokens for entry, _ in chunks) / seconds} if seconds else {}
    peak = max(entry.peak_rss_bytes for entry, _ in chunks)
    measured = tuple(figures(every, judgement.judged, peak_rss_bytes=peak, **speed))
    return reported(judgement, first.engine, first.hardware, measured, facts, fingerprint_of(decides))


def evaluate_in_chunks(
    artifact: str | Path | Artifact | Source,
    folder: Path,
    chunk: Chunk | None = None,
    *,
    engine: EngineSpec,
    memory: WalkSpec = WALK,
    revision: str | None = None,
    adapters: Sequence[str | Path] = (),
    pad_vocab: bool = False,
    source: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> ChunkEntry | Report:
    """Judge a chunk of what `evaluate` would judge, or merge those that are in `folder` where `chunk` is None.

    `settings` are fields of EvaluationSpec. See `judge_chunk` and `merge_chunks`.
    """
    spec = parse(EvaluationSpec, settings, "evaluation")
    model, exact = open_judged(artifact, revision, source, adapters, pad_vocab)
    text, chosen, progress = load_text(spec.text, "evaluation"), choose(model, engine), progress or Progress()
    if chunk is None:
        return merge_chunks(model, spec, text, chosen, folder, progress, exact, memory)
    return judge_chunk(model, spec, text, chosen, chunk, folder, progress, exact, memory)


def _of_perplexity(spec: EvaluationSpec) -> EvaluationSpec:
    if other := set(spec.probes) - set(PROBES):
        raise RecipeError(f"the probe {min(other)} is not measured in chunks: only perplexity and divergence are")
    return spec.model_copy(update={"probes": PROBES})


def _like(
    first: ChunkEntry, model: Model, spec: EvaluationSpec, text: Text, engine: ChosenEngine, source: Source | None,
    memory: WalkSpec,
) -> Judgement:  # fmt: skip
    """The judgement that is asked for; what this machine would choose by its cores and memory is as in the chunk.

    Nothing is computed here, so neither has to be enough.
    """
    used = first.decides.get("engine")
    if memory.walk is None and isinstance(used, list):
        memory = WalkSpec(walk=used[-1] is True, max_memory_gb=ENDLESS_GB)
    judgement = prepare(model, spec, text, engine, source, memory)
    settings = first.decides.get("settings")
    if spec.threads or not isinstance(settings, dict):
        return judgement
    values = judgement.spec.model_dump() | {"threads": tuple(settings.get("threads") or ())}
    return replace(judgement, spec=parse(EvaluationSpec, values, "chunk"))


def _ends(cut: Cut) -> list[int]:
    """The number of the first judged position of each window, and of all positions."""
    return [0, *np.cumsum([len(window.targets) for window in cut.windows]).tolist()]


def _baseline_of(
    judgement: Judgement, part: tuple[int, int], windows: WindowsFile, temp: Path, progress: Progress
) -> tuple[BaselineName | None, str | None]:
    """The source's baseline for a part of the windows, and the sha256 of its states there.

    The whole one where it is there already, else the part, which is made.
    """
    name, ends = judgement.baseline, _ends(judgement.judged)
    if name is None:
        return None, None
    if (facts := BaselineFiles(name.key).read_facts()) is not None:
        return name, _digest(BaselineFiles(name.key), facts, ends[part[0]], ends[part[1]])
    here = {"key": f"{name.key}.{part[0]}-{part[1]}", "first": ends[part[0]], "positions": ends[-1]}
    name = name.model_copy(update=here)
    make = partial(run_child, baseline_request(judgement, name, windows, part), temp, progress)
    return name, ensure(BaselineFiles(name.key), make, progress.say).sha256


def _digest(files: BaselineFiles, facts: BaselineEntry, start: int, stop: int) -> str:
    """sha256 of the states of the positions from `start` to the one before `stop`."""
    states = np.memmap(files.states, np.uint8, "r", shape=(facts.positions, 2 * facts.width))
    digest = hashlib.sha256()
    for at in range(start, stop, DIGEST_ROWS):
        digest.update(states[at : min(at + DIGEST_ROWS, stop)].tobytes())
    return digest.hexdigest()


def _all_positions(cut: Cut, chunks: list[tuple[ChunkEntry, Positions]], folder: Path) -> Positions:
    """The positions of all windows in their order; raises ReportError where some are missing or two chunks differ."""
    ends = _ends(cut)
    every = np.zeros(ends[-1], RECORD)
    done = 0
    for entry, positions in chunks:
        first, stop = entry.first, entry.stop
        place = folder / f"{entry.name}.json"
        own = chunk_of(cut.windows, entry.index, entry.count) if entry.index < entry.count else None
        if (first, stop) != own or len(positions) != ends[stop] - ends[first]:
            raise ReportError(f"{place} does not hold the windows of chunk {entry.index}/{entry.count}. {AGAIN}")
        if first > done:
            break
        both = min(done, stop)
        if every[ends[first] : ends[both]].tobytes() != positions[: ends[both] - ends[first]].tobytes():
            raise ReportError(f"{place} differs from another chunk in the same windows. Remove one of them.")
        every[ends[first] : ends[stop]] = positions
        done = max(done, stop)
    if done < len(cut.windows):
        behind = min((entry.first for entry, _ in chunks if entry.first > done), default=len(cut.windows))
        have = ", ".join(f"{entry.index}/{entry.count}" for entry, _ in chunks)
        raise ReportError(
            f"{folder} lacks the windows {done} to {behind - 1} of {len(cut.windows)}; it has the chunks {have}. "
            "Judge the others, too."
        )
    return every


def _whole_baseline(
    judgement: Judgement, chunks: list[tuple[ChunkEntry, Positions]], folder: Path, progress: Progress
) -> BaselineEntry | None:
    """The whole baseline, made of the parts where it is not there; raises ReportError for a chunk of another one."""
    name, ends = judgement.baseline, _ends(judgement.judged)
    if name is None:
        return None
    files = BaselineFiles(name.key)
    with temporary_folder() as temp:
        windows = WindowsFile(path=str(temp / "cut.npz"), about=judgement.judged.about)
        judgement.judged.save(Path(windows.path))

        def make() -> None:
            if not _joined(files, len(judgement.judged.windows)):
                run_child(baseline_request(judgement, name, windows), temp, progress)

        facts = ensure(files, make, progress.say)
    for entry, _ in chunks:
        if entry.baseline != _digest(files, facts, ends[entry.first], ends[entry.stop]):
            raise ReportError(
                f"{folder / entry.name}.json was judged against another baseline of the source. {AGAIN} With a shared "
                "QUANTKIT_CACHE all chunks have the same."
            )
    return facts


def _joined(files: BaselineFiles, windows: int) -> bool:
    """Whether the parts of a baseline that are there were all of it, and are now the whole one in its files."""
    named = (re.fullmatch(rf"{files.key}\.(\d+)-(\d+)", path.stem) for path in baselines().glob(f"{files.key}.*.json"))
    stops: dict[int, int] = {}
    for first, stop in sorted((int(found[1]), int(found[2])) for found in named if found):
        stops[first] = stop  # the longest of those that begin alike
    parts: list[tuple[BaselineFiles, BaselineEntry]] = []
    done = 0
    while done < windows:
        part = BaselineFiles(f"{files.key}.{done}-{stops.get(done, done)}")
        if (facts := part.read_facts()) is None:
            return False
        parts.append((part, facts))
        done = stops[done]
    with files.partial.open("wb") as whole:
        for part, _ in parts:
            with part.states.open("rb") as states:
                shutil.copyfileobj(states, whole)
    total = {"windows": windows, "positions": sum(facts.positions for _, facts in parts)}
    keep(files, parts[0][1].model_copy(update={**total, "sha256": sha256_of(files.partial)}))
    return True
