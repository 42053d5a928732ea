"""How many threads compute: as many as are asked for, in every engine.

In processes of their own: this one computes on one thread.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from killed import forked
from tiny_models import EVALUATION

import quantkit
from quantkit.artifact import Artifact
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine
from quantkit.formats.source import open_model


def settled() -> int:
    """Threads of this process: what was loaded before, and what helps for a moment, may still have some that end."""
    gc.collect()
    counts = [0]
    while len(set(counts[-5:])) > 1 or len(counts) < 6:
        time.sleep(0.05)
        counts.append(sum(1 for _ in Path("/proc/self/task").iterdir()))
    return counts[-1]


def count(engine: str, loaded: Any, before: int) -> int | list[int]:
    """How many threads a model computes on: as the engine counts, or those that have come."""
    assert len(list(loaded.stream(list(range(3, 40)), 4))) == 4
    if engine == "llamacpp":
        return [loaded._c.llama_n_threads(loaded._context), loaded._c.llama_n_threads_batch(loaded._context)]
    return settled() - before if engine == "ctranslate2" else torch.get_num_threads()


def count_loaded(folders: dict[str, Path], out: Path) -> None:
    """Load each model with one thread and with three, and change three to two where that can be."""
    counts: dict[str, int | list[int]] = {}
    for engine, folder in folders.items():
        for threads in (1, 3):
            loaded, before = None, settled()
            loaded = find_engine(engine).load(open_model(str(folder)), LoadSpec(threads, 64))
            counts[f"{engine} {threads}"] = count(engine, loaded, before)
        if change := find_engine(engine).set_threads:
            change(loaded, 2)
            counts[f"{engine} changed"] = count(engine, loaded, 0)
    out.write_text(json.dumps(counts))
    os._exit(0)  # as the worker ends: the engines' threads may abort an ordinary exit


def test_an_engine_has_as_many_threads_as_are_asked_for(
    tiny_with: Callable[..., Path], artifact_of: Callable[..., Artifact], tmp_path: Path
) -> None:
    pytest.importorskip("ctranslate2")
    pytest.importorskip("llama_cpp")
    small = tiny_with(num_hidden_layers=1)
    folders = {
        "llamacpp": artifact_of("gguf", "Q8_0", model=small).folder,
        "ctranslate2": artifact_of("ctranslate2", "int8", model=small).folder,
        "reference": small,
        "transformers": small,
    }
    child = forked(partial(count_loaded, folders, tmp_path / "told.json"), tmp_path / "log")
    log = child.wait()
    assert child.code == 0, log
    counts = json.loads((tmp_path / "told.json").read_text())
    for engine in ("reference", "transformers"):
        assert (counts[f"{engine} 1"], counts[f"{engine} 3"], counts[f"{engine} changed"]) == (1, 3, 2)
    assert (counts["llamacpp 1"], counts["llamacpp 3"], counts["llamacpp changed"]) == ([1, 1], [3, 3], [2, 2])
    assert "ctranslate2 changed" not in counts
    # It tells nothing: a model has threads that wait, and those that compute beside them come with the second.
    assert counts["ctranslate2 3"] >= counts["ctranslate2 1"] + 2


def test_the_pools_of_a_judging_process_have_that_size(
    gguf: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the user has set another for one of them."""
    pools = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    for name in pools:
        monkeypatch.setenv(name, "7")
    python, seen = tmp_path / "python", tmp_path / "seen"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *evaluation.worker*) env >> {seen};; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    quantkit.evaluate(gguf, probes=["size"], python=str(python), **EVALUATION)
    lines = seen.read_text().splitlines()
    assert [line for line in lines if line.startswith(pools)] == [
        line for line in lines if line.endswith("NUM_THREADS=1")
    ]
    assert {f"{name}=1" for name in pools} <= set(lines)
