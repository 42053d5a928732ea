"""How many threads compute: what is asked for, in every engine, and what was there before, after every part of ours.

In processes of their own: this one computes on one thread.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import EVALUATION, save_tiny

import quantkit
from quantkit.conversion.convert import convert

ENVIRONMENT = {
    **os.environ,
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
}
# Loads models with one thread and with three, generates, and says how many threads came, or what the engine counts.
LOADED = """
import gc, json, os, sys, time
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine
from quantkit.formats.source import open_model
counts = {}


def now():
    # What was loaded before, and what helps for a moment, may still have threads that end.
    globals().pop("loaded", None)
    gc.collect()
    return settled()


def settled():
    counts = [0]
    while len(set(counts[-5:])) > 1 or len(counts) < 6:
        time.sleep(0.05)
        counts.append(len(os.listdir("/proc/self/task")))
    return counts[-1]


def count(before):
    assert len(list(loaded.stream(list(range(3, 40)), 4))) == 4
    if engine == "llamacpp":
        return [loaded._c.llama_n_threads(loaded._context), loaded._c.llama_n_threads_batch(loaded._context)]
    if engine == "ctranslate2":
        return settled() - before
    return sys.modules["torch"].get_num_threads()


for engine, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    for threads in (1, 3):
        before = now()
        loaded = find_engine(engine).load(open_model(folder), LoadSpec(threads, 64))
        counts[f"{engine} {threads}"] = count(before)
for engine, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    if change := find_engine(engine).set_threads:
        loaded = find_engine(engine).load(open_model(folder), LoadSpec(3, 64))
        change(loaded, 2)
        counts[f"{engine} changed"] = count(0)
print(json.dumps(counts))
sys.stdout.flush()
os._exit(0)
"""


def told(code: str, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=1)


def test_an_engine_has_as_many_threads_as_are_asked_for(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    pytest.importorskip("llama_cpp")
    made = {
        "llamacpp": convert(str(tiny), "gguf", "Q8_0", tmp_path / "gguf").folder,
        "ctranslate2": convert(str(tiny), "ctranslate2", "int8", tmp_path / "ct2").folder,
        "reference": tiny,
        "transformers": tiny,
    }
    counts = told(LOADED, *(part for pair in made.items() for part in pair))
    for engine in ("reference", "transformers"):
        assert (counts[f"{engine} 1"], counts[f"{engine} 3"], counts[f"{engine} changed"]) == (1, 3, 2)
    assert (counts["llamacpp 1"], counts["llamacpp 3"], counts["llamacpp changed"]) == ([1, 1], [3, 3], [2, 2])
    assert "ctranslate2 changed" not in counts
    # It tells nothing: a model has threads that wait, and those that compute beside them come with the second.
    assert counts["ctranslate2 3"] >= counts["ctranslate2 1"] + 2


def test_the_pools_of_a_judging_process_have_that_size(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    quantkit.evaluate(str(tiny), probes=["size"], python=str(python), **EVALUATION)
    lines = seen.read_text().splitlines()
    assert [line for line in lines if line.startswith(pools)] == [
        line for line in lines if line.endswith("NUM_THREADS=1")
    ]
    assert {f"{name}=1" for name in pools} <= set(lines)


# Each place that changes the count for a while; prints the count after it.
CHANGED = """
import json, sys
from pathlib import Path
import torch
from tiny_llama import converted, save_llama
from quantkit.numerics.error_feedback import PARALLEL_ELEMENTS, round_columns
torch.set_num_threads(2)
counts, inside = {}, []


def rounded(rows, fit=None):
    columns, factor = torch.randn(8, rows), torch.eye(8)
    scales, zeros = torch.ones(1, rows), torch.zeros(1, rows)
    return round_columns(columns, factor, scales, zeros, torch.zeros(8, dtype=torch.int64), 15, fit, 8)


def noted(_column, _ahead):
    inside.append(torch.get_num_threads())


def failing(_column, _ahead):
    raise ValueError("no grid")


rounded(4, noted)
counts["a small block"] = torch.get_num_threads()
rounded(PARALLEL_ELEMENTS // 8, noted)
counts["a large block"] = torch.get_num_threads()
try:
    rounded(4, failing)
except ValueError:
    counts["an error"] = torch.get_num_threads()
model = save_llama(Path(sys.argv[1]) / "model", num_hidden_layers=1)
converted(model, Path(sys.argv[1]) / "out", "gptq", static_groups=False)
counts["gptq"] = torch.get_num_threads()
converted(model, Path(sys.argv[1]) / "out", "gguf", "Q4_K_M", force=True, rounding="gptq")
counts["gguf"] = torch.get_num_threads()
converted(model, Path(sys.argv[1]) / "out", "ctranslate2", "int8", force=True)
counts["ctranslate2"] = torch.get_num_threads()
print(json.dumps({"counts": counts, "inside": inside}))
"""


def test_the_count_is_what_it_was_after_every_part_that_changes_it(tmp_path: Path) -> None:
    values = told(CHANGED, tmp_path)
    assert set(values["counts"].values()) == {2}, values
    assert {"a small block", "a large block", "an error", "gguf", "ctranslate2"} <= values["counts"].keys()
    # One thread for a small block, all for a large one.
    assert values["inside"] == [1, 2]
