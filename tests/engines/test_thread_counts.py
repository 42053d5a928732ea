import gc
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from killed import told
from tiny_llama import converted
from tiny_models import EVALUATION

import quantkit
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine
from quantkit.formats.source import open_model
from quantkit.numerics.error_feedback import PARALLEL_ELEMENTS, ColumnGrids, round_columns
from quantkit.records.recipe import EngineSpec


def settled():
    """Threads of this process: what was loaded before, and what helps for a moment, may still have some that end."""
    gc.collect()
    counts = [0]
    while len(set(counts[-5:])) > 1 or len(counts) < 6:
        time.sleep(0.05)
        counts.append(sum(1 for _ in Path("/proc/self/task").iterdir()))
    return counts[-1]


def count(engine, loaded, before):
    """How many threads a model computes on: as the engine counts, or those that have come."""
    assert len(list(loaded.stream(list(range(3, 40)), 4))) == 4
    if engine == "llamacpp":
        return [loaded._c.llama_n_threads(loaded._context), loaded._c.llama_n_threads_batch(loaded._context)]
    return settled() - before if engine == "ctranslate2" else torch.get_num_threads()


def count_loaded(folders, out):
    """Load each model with one thread and with three, and change three to two where that can be."""
    counts = {}
    for engine, folder in folders.items():
        for threads in (1, 3):
            loaded, before = None, settled()
            loaded = find_engine(engine).load(open_model(str(folder)), LoadSpec(threads, 64))
            counts[f"{engine} {threads}"] = count(engine, loaded, before)
        if find_engine(engine).sets_threads:
            loaded.set_threads(2)
            counts[f"{engine} changed"] = count(engine, loaded, 0)
    out.write_text(json.dumps(counts))
    os._exit(0)  # as the worker ends: the engines' threads may abort an ordinary exit


def test_an_engine_has_as_many_threads_as_are_asked_for(one_block, artifact_of, tmp_path):
    pytest.importorskip("ctranslate2")
    pytest.importorskip("llama_cpp")
    folders = {
        "llamacpp": artifact_of("gguf", "Q8_0", model=one_block).folder,
        "ctranslate2": artifact_of("ctranslate2", "int8", model=one_block).folder,
        "reference": one_block,
        "transformers": one_block,
    }
    counts = told(count_loaded, folders, folder=tmp_path)
    for engine in ("reference", "transformers"):
        assert (counts[f"{engine} 1"], counts[f"{engine} 3"], counts[f"{engine} changed"]) == (1, 3, 2)
    assert (counts["llamacpp 1"], counts["llamacpp 3"], counts["llamacpp changed"]) == ([1, 1], [3, 3], [2, 2])
    assert "ctranslate2 changed" not in counts
    # It tells nothing: a model has threads that wait, and those that compute beside them come with the second.
    assert counts["ctranslate2 3"] >= counts["ctranslate2 1"] + 2


def test_the_pools_of_an_evaluating_process_have_that_size(gguf, tmp_path, monkeypatch):
    """Also where the user has set another for one of them."""
    pools = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    for name in pools:
        monkeypatch.setenv(name, "7")
    python, seen = tmp_path / "python", tmp_path / "seen"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *evaluation.worker*) env >> {seen};; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    quantkit.evaluate(gguf, probes=["size"], engine=EngineSpec(python=str(python)), **EVALUATION)
    lines = seen.read_text().splitlines()
    assert [line for line in lines if line.startswith(pools)] == [
        line for line in lines if line.endswith("NUM_THREADS=1")
    ]
    assert {f"{name}=1" for name in pools} <= set(lines)


def count_after(model, folder, out):
    """Do each thing that changes the count for a while; write the count after it, and those inside of blocks."""
    torch.set_num_threads(2)
    counts = {}
    inside = []

    def rounded(rows, fit):
        scales, zeros, groups = torch.ones(1, rows), torch.zeros(1, rows), torch.zeros(8, dtype=torch.int64)
        round_columns(torch.randn(8, rows), torch.eye(8), ColumnGrids(scales, zeros, groups, 15), fit, 8)

    def noted(_column, _ahead):
        inside.append(torch.get_num_threads())

    def failing(_column, _ahead):
        raise ValueError("no grid")

    rounded(4, noted)
    counts["a small block"] = torch.get_num_threads()
    rounded(PARALLEL_ELEMENTS // 8, noted)
    counts["a large block"] = torch.get_num_threads()
    with pytest.raises(ValueError, match="no grid"):
        rounded(4, failing)
    counts["an error"] = torch.get_num_threads()
    ways = {"gptq": {"static_groups": False}, "gguf": {"rounding": "gptq"}, "ctranslate2": {}}
    for (method, options), bits in zip(ways.items(), ("4", "Q4_K_M", "int8"), strict=True):
        converted(model, folder / method, method, bits, 16, **options)
        counts[method] = torch.get_num_threads()
    out.write_text(json.dumps({"counts": counts, "inside": inside}))


def test_the_count_is_what_it_was_after_every_part_that_changes_it(one_block, tmp_path):
    values = told(count_after, one_block, tmp_path, folder=tmp_path)
    assert set(values["counts"].values()) == {2}, values
    assert len(values["counts"]) == 6
    # One thread for a small block, all for a large one.
    assert values["inside"] == [1, 2]
