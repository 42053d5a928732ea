"""Judge with several processes: each rank one chunk of the windows; the first puts all of them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.data.texts import load_text
from quantkit.errors import RecipeError
from quantkit.evaluation.chunks.judge import judge_chunk, merge_chunks
from quantkit.evaluation.chunks.records import Chunk
from quantkit.evaluation.engine_choice import choose
from quantkit.evaluation.evaluate import WALK, open_judged
from quantkit.progress import Progress
from quantkit.recipe import EngineSpec, EvaluationSpec, WalkSpec, parse
from quantkit.report.records import Report
from quantkit.system.processor import usable_cores
from quantkit.system.ranks.group import from_leader, leads, meet, place
from quantkit.system.temporary import temporary_folder


def evaluate_in_ranks(
    artifact: str | Path,
    folder: Path | None = None,
    *,
    engine: EngineSpec,
    memory: WalkSpec = WALK,
    revision: str | None = None,
    adapters: Sequence[str | Path] = (),
    pad_vocab: bool = False,
    source: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Report | None:
    """The report of what `evaluate` would judge, with its digits; None for all ranks but the first.

    Chunks lie in `folder` (default: a temporary one of the first rank's machine). Threads are those of each rank: where
    none are given, the machine's cores are shared out. Raises RecipeError for a device other than the processor.
    """
    here, progress = place(), progress or Progress()
    if engine.device != "cpu":
        raise RecipeError(
            f"{here.size} processes cannot judge on {engine.device}. Judge a --chunk on each card, then put the chunks "
            "together."
        )
    spec = parse(EvaluationSpec, settings, "evaluation")
    if not spec.threads:
        spec = spec.model_copy(update={"threads": (max(1, usable_cores() // here.local_size),)})
    model, exact = open_judged(artifact, revision, source, adapters, pad_vocab)
    text, chosen = load_text(spec.text, "evaluation"), choose(model, engine)
    with _chunks(folder) as shared:
        judge_chunk(model, spec, text, chosen, Chunk(here.rank, here.size), shared, progress, exact, memory)
        meet()
        if not leads():
            return None
        return merge_chunks(model, spec, text, chosen, shared, progress, exact, memory)


@contextmanager
def _chunks(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
    elif leads():
        with temporary_folder() as made:
            yield from_leader(made)
    else:
        yield from_leader(Path())
