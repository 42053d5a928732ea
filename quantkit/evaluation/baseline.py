"""The baseline: what the source model computes on the judged positions, kept small and used again.

Kept are the states that go into the source's output layer, (N, D) float16 for the N judged positions, and not its
logits: these come back through the source's own output layer, in float32. A baseline is found by the source's hashes,
the tokens, the protocol and the dtype that the source was computed in. It is a file of plain numbers and a JSON file
beside it that is written last; a lock makes a second process wait instead of doing the same work. A run that was killed
leaves whole windows behind, and the next one goes on after them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.contracts.windows import Cut, batch_edge, batch_end
from quantkit.errors import EngineError, QuantkitError
from quantkit.evaluation.request import BaselineName
from quantkit.formats.source import open_source
from quantkit.models.source import Source
from quantkit.probes._scores import score
from quantkit.recipe import parse
from quantkit.report.records import BaselineEntry
from quantkit.report.statistics import mean_and_error
from quantkit.system.cache import cache_folder
from quantkit.system.files import replace_text, sha256_of
from quantkit.untrusted import read_object, told

if TYPE_CHECKING:
    from quantkit.models.output_head import OutputHead

FORMAT = 1
MOST_FACTS = 1 << 20  # bytes
ANOTHER_PLACE = "Set QUANTKIT_CACHE to another folder."
NOISE_WINDOWS = 4  # on which rounding and noise are measured
ROWS = 256  # positions whose logits are in memory


def folder() -> Path:
    """Where baselines lie, in the user's cache folder."""
    return cache_folder() / "baselines"


def resume_folder() -> Path:
    """Where windows of interrupted evaluations lie."""
    return cache_folder() / "evaluations"


def key_of(source: Source, cut: Cut, dtype: str) -> str:
    """The name of a baseline: a hash of all that it depends on."""
    parts = {
        "format": FORMAT,
        "source": source.hashes,
        "tokens": cut.about.tokens_sha256,
        "protocol": cut.about.protocol,
        "scored": cut.about.scored,
        "dtype": dtype,
        "transformers": version("transformers"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class BaselineFiles:
    """The files of one baseline."""

    key: str

    @property
    def states(self) -> Path:
        """(N, D) float16, little-endian."""
        return folder() / f"{self.key}.f16"

    @property
    def facts(self) -> Path:
        """What is known of it; written last."""
        return folder() / f"{self.key}.json"

    @property
    def partial(self) -> Path:
        """The states of the windows that are done, while it is made."""
        return folder() / f"{self.key}.partial"

    @property
    def lock(self) -> Path:
        """Locked by the process that makes it."""
        return folder() / f"{self.key}.lock"

    def read_facts(self) -> BaselineEntry | None:
        """The facts of a whole baseline; None where there is none or its bytes are not those that were written."""
        try:
            values = read_object(self.facts, EngineError, most=MOST_FACTS)
            facts = parse(BaselineEntry, values, str(self.facts))
            whole = self.states.stat().st_size == 2 * facts.positions * facts.width
        except (OSError, QuantkitError):
            return None
        return facts if whole and facts.format == FORMAT and sha256_of(self.states) == facts.sha256 else None


def ensure(files: BaselineFiles, make: Callable[[], object], say: Callable[[str], None]) -> BaselineEntry:
    """The facts of the baseline in `files`, made by `make` where there is no whole one.

    Of two processes one makes it and the other waits. Raises what `make` raises.
    """
    from filelock import FileLock, Timeout

    if (facts := files.read_facts()) is not None:
        return facts
    lock = FileLock(files.lock)
    with told(f"the cache folder {folder()} cannot be written", EngineError, ANOTHER_PLACE):
        folder().mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"another process computes this baseline of the source; waiting for it ({files.lock})")
            lock.acquire()
    try:
        if (facts := files.read_facts()) is not None:
            return facts
        if files.facts.exists() or files.states.exists():
            say(f"the baseline {files.states.name} was damaged and is computed again")
            with told(f"{files.states} is damaged and cannot be removed", EngineError, ANOTHER_PLACE):
                files.facts.unlink(missing_ok=True)
                files.states.unlink(missing_ok=True)
        make()
        made = files.read_facts()
        if made is None:
            raise EngineError(
                f"the baseline {files.states} was written and does not read back: is the disk of {folder()} sound? "
                f"{ANOTHER_PLACE}"
            )
        return made
    finally:
        lock.release()


class SourceHead:
    """The source's output layer in float32, which comes into memory when it is first asked for, and nothing else.

    `width` is that of its states.
    """

    def __init__(self, source: Source) -> None:
        from quantkit.models.skeleton import open_skeleton

        self._source, self._skeleton = source, open_skeleton(source.config)
        self.width = int(self._skeleton.model.get_output_embeddings().weight.shape[1])

    @cached_property
    def _head(self) -> OutputHead:
        from quantkit.models.output_head import load_output_layer

        return load_output_layer(self._source, self._skeleton)

    def logits(self, states: NDArray[np.float16] | NDArray[np.float32]) -> NDArray[np.float32]:
        """(n, D) states -> (n, V) float32."""
        import torch

        with torch.inference_mode():
            logits: NDArray[np.float32] = self._head.logits(torch.from_numpy(states.astype(np.float32))).numpy()
            return logits


class Baseline:
    """A baseline, read from its first position to its last."""

    def __init__(self, files: BaselineFiles, facts: BaselineEntry, source: Source) -> None:
        self._states = np.memmap(files.states, np.float16, "r", shape=(facts.positions, facts.width))
        self._head = SourceHead(source)
        self._first, self._block = -1, np.empty((0, 0), np.float32)

    def logits(self, start: int, count: int) -> NDArray[np.float32]:
        """(count, V) float32 of the judged positions from `start` on.

        They are computed in blocks of `ROWS` from the text's first position on, wherever somebody begins to read: the
        last digits of a product depend on how many rows it has.
        """
        parts: list[NDArray[np.float32]] = []
        while count:
            inside = start % ROWS
            if self._first != start - inside:
                self._first = start - inside
                self._block = self._head.logits(self._states[self._first : self._first + ROWS])
            parts.append(self._block[inside : inside + count])
            if not len(parts[-1]):
                break  # behind the last position
            start, count = start + len(parts[-1]), count - len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def open_baseline(name: BaselineName) -> Baseline:
    """A baseline that is there; raises EngineError."""
    files = BaselineFiles(name.key)
    facts = files.read_facts()
    if facts is None:
        raise EngineError(f"the baseline {files.states} has changed while it was used. Evaluate again.")
    source = open_source(name.model, name.revision, name.adapters)
    return Baseline(files, facts, source)


def make(files: BaselineFiles, source: Source, loaded: Any, cut: Cut, advance: Callable[..., None]) -> None:
    """Compute the states of all judged positions with `loaded`, a model of `source` in torch; in bfloat16 afterwards.

    The floors are measured on the first windows of the text.
    Called with the lock held. Raises EngineError where the states do not fit into float16.
    """
    head = SourceHead(source)
    ends = np.cumsum([0, *(len(window.targets) for window in cut.windows)])
    row = 2 * head.width
    done = files.partial.stat().st_size // row if files.partial.exists() else 0
    first = int(np.searchsorted(ends, done, side="right")) - 1  # whole windows of an interrupted run
    with files.partial.open("r+b" if done else "w+b") as file:
        file.truncate(int(ends[first]) * row)
        file.seek(0, 2)
        advance(first)
        edge = batch_edge(cut.windows, first)
        few: list[NDArray[np.float32]] = []
        for number, states in enumerate(islice(loaded.states(cut.windows[edge:]), first - edge, None), first):
            file.write(_halved(source, states).tobytes())
            if number < NOISE_WINDOWS and number == len(few):
                few.append(states.float().numpy().copy())
            advance()
    dtype = loaded.dtype
    floors = _floors(head, loaded, cut, few)
    facts = BaselineEntry(
        model=source.name,
        dtype=dtype,
        format=FORMAT,
        protocol=cut.about.protocol,
        n_ctx=cut.about.n_ctx,
        windows=len(cut.windows),
        positions=int(ends[-1]),
        width=head.width,
        sha256=sha256_of(files.partial),
        **floors,
    )
    files.partial.replace(files.states)
    replace_text(files.facts, facts.model_dump_json(indent=2) + "\n")


def _floors(head: SourceHead, loaded: Any, cut: Cut, exact: list[NDArray[np.float32]]) -> dict[str, float]:
    """What float16 and bfloat16 cost on the first windows of a text; the model is in bfloat16 afterwards.

    `exact`: their (n, D) states; where an interrupted run has made some of them, all are computed again.
    """
    few = min(NOISE_WINDOWS, len(cut.windows))
    if len(exact) < few:
        batches = cut.windows[: batch_end(cut.windows, few - 1)]
        exact = [states.float().numpy() for states in islice(loaded.states(batches), few)]
    loaded.to("bfloat16")
    rounding: list[NDArray[np.float64]] = []
    noise: list[NDArray[np.float64]] = []
    for part, coarse in zip(exact, loaded.states(cut.windows[:few]), strict=True):
        others = (part.astype(np.float16), coarse.float().numpy())
        for found, divergences in zip((rounding, noise), _divergences(head, part, others), strict=True):
            found.append(divergences)
    mean, stderr = mean_and_error(np.concatenate(noise))
    if not math.isfinite(stderr):  # a single position is as uncertain as can be
        stderr = mean
    # A divergence is never below zero: a mean that is, is one that float32 cannot tell from zero.
    least = max(0.0, float(np.concatenate(rounding).mean()))
    return {"rounding": least, "noise": mean, "noise_stderr": stderr}


def _halved(source: Source, states: Any) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        halves: NDArray[np.float16] = states.float().numpy().astype(np.float16)
    if not np.isfinite(halves).all():
        raise EngineError(f"{source.model}: its last hidden states do not fit into float16; judge with --no-divergence")
    return halves


def _divergences(head: SourceHead, exact: NDArray[Any], others: Sequence[NDArray[Any]]) -> list[NDArray[np.float64]]:
    """The divergence of each row of `others`, all (n, D) states, from the same row of the exact ones."""
    parts: list[list[NDArray[np.float64]]] = [[] for _ in others]
    for start in range(0, len(exact), ROWS):
        rows = slice(start, start + ROWS)
        theirs = head.logits(exact[rows])
        for found, other in zip(parts, others, strict=True):
            ours = head.logits(other[rows])
            found.append(score(ours, np.zeros(len(ours), np.int64), theirs)["divergence"])
    return [np.concatenate(found) for found in parts]
