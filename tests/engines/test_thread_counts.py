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
# Loads a model with some threads, generates, and says what the engine counts and how many threads the process has.
LOADED = """
import json, os, sys
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine
from quantkit.formats.source import open_model
name, folder, threads = sys.argv[1:]
loaded = find_engine(name).load(open_model(folder), LoadSpec(int(threads), 64))
before = len(os.listdir("/proc/self/task"))
assert len(list(loaded.stream(list(range(3, 40)), 4))) == 4
counts = {"threads": len(os.listdir("/proc/self/task"))}
if "torch" in sys.modules:
    counts["torch"] = sys.modules["torch"].get_num_threads()
if name == "llamacpp":
    counts["llama.cpp"] = loaded._c.llama_n_threads(loaded._context)
    counts["llama.cpp, prompts"] = loaded._c.llama_n_threads_batch(loaded._context)
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


@pytest.mark.parametrize("engine", ["reference", "transformers", "ctranslate2", "llamacpp"])
def test_an_engine_has_as_many_threads_as_are_asked_for(engine: str, tiny: Path, tmp_path: Path) -> None:
    model = tiny
    if engine in ("ctranslate2", "llamacpp"):
        pytest.importorskip("ctranslate2" if engine == "ctranslate2" else "llama_cpp")
        method, bits = ("ctranslate2", "int8") if engine == "ctranslate2" else ("gguf", "Q8_0")
        model = convert(str(tiny), method, bits, tmp_path / "out").folder
    one, three = (told(LOADED, engine, model, threads) for threads in (1, 3))
    if engine in ("reference", "transformers"):
        assert (one["torch"], three["torch"]) == (1, 3)
        return
    assert three["threads"] - one["threads"] == 2
    if engine == "llamacpp":
        assert {one["llama.cpp"], one["llama.cpp, prompts"]} == {1}
        assert {three["llama.cpp"], three["llama.cpp, prompts"]} == {3}


@pytest.mark.parametrize("own", ["1", "7"])
def test_the_pools_of_a_judging_process_have_that_size(
    own: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the user has set another for one of them."""
    pools = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    for name in pools:
        monkeypatch.setenv(name, own)
    python = tmp_path / "python"
    seen = tmp_path / "seen"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *evaluation.worker*) env >> {seen};; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    for threads in (1, 2):
        seen.unlink(missing_ok=True)
        quantkit.evaluate(str(tiny), probes=["size"], python=str(python), **{**EVALUATION, "threads": (threads,)})
        lines = seen.read_text().splitlines()
        for name in pools:
            assert [line for line in lines if line.startswith(f"{name}=")] == [f"{name}={threads}"]


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
for method, options in (("gptq", {}), ("gptq", {"static_groups": False}), ("awq", {"rounding": "gptq"}), ("rtn", {})):
    converted(model, Path(sys.argv[1]) / "out", method, force=True, **options)
    counts[f"{method} {options}"] = torch.get_num_threads()
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
