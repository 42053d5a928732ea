"""The baseline: the source model's final hidden states at the scored positions, cached on disk.

The states, (N, D) float16 for N scored positions, are the inputs of the source's output layer, which computes the
source's logits from them in float32. The cache key is a hash of the source's hashes, the tokens, the protocol and the
dtype. The JSON file next to the states is written last; a lock makes a second process wait. After a killed run, the
next run continues after the last whole batch. This file also lists and clears the cache.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quantkit.contracts.engine import Cut, StatesModel, alike, positions_in
from quantkit.errors import EngineError, QuantkitError
from quantkit.evaluation.perplexity import score
from quantkit.models.source import Source
from quantkit.records.recipe import parse
from quantkit.records.report import BaselineEntry
from quantkit.report.statistics import mean_and_error
from quantkit.system.files import cache_folder, replace_text, sha256_of
from quantkit.system.untrusted import read_object, reraise_as

if TYPE_CHECKING:
    import torch

    from quantkit.models.output_head import OutputHead

FORMAT = 1
MOST_FACTS = 1 << 20  # bytes
ANOTHER_PLACE = "Set QUANTKIT_CACHE to another folder."
NOISE_WINDOWS = 4  # on which rounding and noise are measured
ROWS = 256  # positions whose logits are in memory


def folder() -> Path:
    """Return the folder of baselines in the user's cache."""
    return cache_folder() / "baselines"


def resume_folder() -> Path:
    """Return the folder that stores the scored positions of interrupted evaluations."""
    return cache_folder() / "evaluations"


def key_of(source: Source, cut: Cut, dtype: str) -> str:
    """Return the cache key of a baseline: a hash of everything that it depends on."""
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


class BaselineFiles:
    """Paths of one baseline's files: `states`, (N, D) float16, little-endian, and `facts` (JSON), written last.

    `partial`: states of finished batches while the baseline is being made; `lock`: locked by the process that makes it.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.states, self.facts, self.partial, self.lock = (
            folder() / f"{key}.{suffix}" for suffix in ("f16", "json", "partial", "lock")
        )

    def entry(self) -> BaselineEntry:
        """Return the facts without checking the states; raises QuantkitError."""
        return parse(BaselineEntry, read_object(self.facts, EngineError, most=MOST_FACTS), str(self.facts))

    def read_facts(self) -> BaselineEntry | None:
        """Return the facts of a complete baseline; None if it is missing or its bytes have changed."""
        try:
            facts = self.entry()
            whole = self.states.stat().st_size == 2 * facts.positions * facts.width
        except (OSError, QuantkitError):
            return None
        return facts if whole and facts.format == FORMAT and sha256_of(self.states) == facts.sha256 else None


def ensure(files: BaselineFiles, make: Callable[[], object], say: Callable[[str], None]) -> BaselineEntry:
    """Return the facts of the baseline in `files`; if it is missing, compute it first with `make`, under a lock."""
    from filelock import FileLock, Timeout

    if (facts := files.read_facts()) is not None:
        return facts
    lock = FileLock(files.lock)
    with reraise_as(f"the cache folder {folder()} cannot be written", EngineError, ANOTHER_PLACE):
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
            with reraise_as(f"{files.states} is damaged and cannot be removed", EngineError, ANOTHER_PLACE):
                files.facts.unlink(missing_ok=True)
                files.states.unlink(missing_ok=True)
        make()
        if (facts := files.read_facts()) is None:
            raise EngineError(
                f"the baseline {files.states} was written and does not read back: is the disk of {folder()} sound? "
                f"{ANOTHER_PLACE}"
            )
        return facts
    finally:
        lock.release()


class SourceHead:
    """The source's output layer in float32, loaded on first use; `width` is D of the states that it takes."""

    def __init__(self, source: Source) -> None:
        from quantkit.models.skeleton import open_skeleton

        self._source, self._skeleton = source, open_skeleton(source.config)
        self.width = int(self._skeleton.model.get_output_embeddings().weight.shape[1])

    @cached_property
    def _head(self) -> OutputHead:
        from quantkit.models.output_head import load_output_layer

        return load_output_layer(self._source, self._skeleton)

    def logits(self, states: NDArray[np.float16] | NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits (n, V) float32 for states (n, D)."""
        import torch

        with torch.inference_mode():
            logits: NDArray[np.float32] = self._head.logits(torch.from_numpy(states.astype(np.float32))).numpy()
            return logits


class Baseline:
    """The source's logits, computed from a stored baseline; fastest if read in order."""

    def __init__(self, files: BaselineFiles, facts: BaselineEntry, source: Source) -> None:
        self._states = np.memmap(files.states, np.float16, "r", shape=(facts.positions, facts.width))
        self._head = SourceHead(source)
        self._first, self._block = -1, np.empty((0, 0), np.float32)

    def logits(self, start: int, count: int) -> NDArray[np.float32]:
        """Return the logits (count, V) float32 of the scored positions from number `start` on.

        They are always computed in the same blocks of `ROWS` positions: their last digits depend on the block.
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


def open_baseline(key: str, source: Source) -> Baseline:
    """Open a stored baseline of `source`; raises EngineError if it has changed."""
    files = BaselineFiles(key)
    if (facts := files.read_facts()) is None:
        raise EngineError(f"the baseline {files.states} has changed while it was used. Evaluate again.")
    return Baseline(files, facts, source)


def make(files: BaselineFiles, source: Source, loaded: StatesModel, cut: Cut, advance: Callable[..., None]) -> None:
    """Compute and store the final hidden states of all scored positions with `loaded`, and measure the floors.

    The floors, divergences by float16 and bfloat16 alone, come from the first windows; afterwards `loaded` is in
    bfloat16. The caller holds the lock. Raises EngineError if the states do not fit into float16.
    """
    head, batches = SourceHead(source), list(alike(cut.windows))
    ends = np.cumsum([0, *map(positions_in, batches)])
    row = 2 * head.width
    stored = files.partial.stat().st_size // row if files.partial.exists() else 0
    done = int(np.searchsorted(ends, stored, side="right")) - 1  # whole batches of an interrupted run
    first = sum(map(len, batches[:done]))
    exact: list[NDArray[np.float32]] = []
    with files.partial.open("r+b" if stored else "w+b") as file:
        file.truncate(int(ends[done]) * row)
        file.seek(0, 2)
        advance(first)
        for states in _arrays(loaded.states(cut.windows[first:])):
            file.write(_halved(source, states).tobytes())
            if not first and len(exact) < NOISE_WINDOWS:
                exact.append(states.copy())
            advance()
    exact = exact or list(islice(_arrays(loaded.states(cut.windows)), NOISE_WINDOWS))
    dtype = loaded.dtype
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
        **_floors(head, loaded, cut, exact),
    )
    files.partial.replace(files.states)
    replace_text(files.facts, facts.model_dump_json(indent=2) + "\n")


def _arrays(states: Iterator[torch.Tensor]) -> Iterator[NDArray[np.float32]]:
    return (each.float().numpy() for each in states)


def _halved(source: Source, states: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        halves = states.astype(np.float16)
    if not np.isfinite(halves).all():
        raise EngineError(
            f"{source.model}: its last hidden states do not fit into float16; evaluate with --no-divergence"
        )
    return halves


def _floors(head: SourceHead, loaded: StatesModel, cut: Cut, exact: list[NDArray[np.float32]]) -> dict[str, float]:
    """Return the divergences that float16 and bfloat16 alone cause; `exact`: states (n, D) of the first windows."""
    loaded.to("bfloat16")
    rounding: list[NDArray[np.float64]] = []
    noise: list[NDArray[np.float64]] = []
    for part, coarse in zip(exact, _arrays(loaded.states(cut.windows[: len(exact)])), strict=True):
        halves = part.astype(np.float16)
        for start in range(0, len(part), ROWS):
            rows = slice(start, start + ROWS)
            source = head.logits(part[rows])
            for divergences, states in ((rounding, halves), (noise, coarse)):
                logits = head.logits(states[rows])
                divergences.append(score(logits, np.zeros(len(logits), np.int64), source)["divergence"])
    mean, stderr = mean_and_error(np.concatenate(noise))
    if not math.isfinite(stderr):  # a single position has no error
        stderr = mean
    # A divergence is never negative; a negative mean is a rounding error of float32.
    least = max(0.0, float(np.concatenate(rounding).mean()))
    return {"rounding": least, "noise": mean, "noise_stderr": stderr}


@dataclass(frozen=True)
class CacheEntry:
    """An entry of the cache: its description and its size in bytes."""

    what: str
    bytes: int


def list_cache() -> list[CacheEntry]:
    """Return all baselines, complete or not, and all interrupted evaluations."""
    return [entry for entry, _ in _entries()]


def clear_cache() -> list[CacheEntry]:
    """Delete all entries that no process is writing, and return them."""
    from filelock import FileLock, Timeout

    removed = []
    for entry, paths in _entries():
        try:
            with FileLock(paths[0].with_suffix(".lock"), timeout=0):
                for path in paths:
                    path.unlink(missing_ok=True)
                removed.append(entry)
        except Timeout:
            continue
    return removed


def _entries() -> Iterator[tuple[CacheEntry, list[Path]]]:
    for key in sorted({path.stem for path in folder().glob("*.*")}):
        files = BaselineFiles(key)
        paths = [path for path in (files.states, files.facts, files.partial) if path.is_file()]
        what = f"unfinished baseline {key}"
        with suppress(QuantkitError):
            facts = files.entry()
            what = f"{facts.model} in {facts.dtype}, {facts.protocol}, {facts.windows} windows of {facts.n_ctx}"
        if paths:
            yield CacheEntry(what, sum(path.stat().st_size for path in paths)), paths
    for path in sorted(path for path in resume_folder().glob("*.positions") if path.is_file()):
        yield CacheEntry(f"interrupted evaluation {path.stem}", path.stat().st_size), [path]
