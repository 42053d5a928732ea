import json
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest
from tiny_models import EVALUATION, EVALUATION_FLAGS, SAMPLE, fails, succeeds

from quantkit.comparison.compare import compare
from quantkit.data.texts import load_text
from quantkit.errors import RecipeError, ResourceError
from quantkit.evaluation import baseline, memory
from quantkit.evaluation.baseline import BaselineFiles
from quantkit.evaluation.engine_choice import choose
from quantkit.evaluation.evaluate import evaluate, prepare
from quantkit.formats.source import open_model, open_source
from quantkit.records.recipe import EvaluationSpec, MemoryLimits

pytestmark = pytest.mark.usefixtures("new_cache")
QUICK = {**EVALUATION, "probes": ("perplexity",)}
# The logits of many tokens are most of what is in memory; or the weights of the blocks are.
TALL = {"hidden_size": 256, "num_hidden_layers": 1, "vocab_size": 131072}
DEEP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 8}


@contextmanager
def peaks_of_children():
    """The peak resident bytes of each process below this one, by its number, as Linux counts them."""
    peaks, ended = {}, Event()

    def look():
        while not ended.wait(0.01):
            for child in psutil.Process().children(recursive=True):
                with suppress(OSError, TypeError):  # it has ended
                    status = Path(f"/proc/{child.pid}/status").read_text()
                    peaks[child.pid] = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024

    looking = Thread(target=look)
    looking.start()
    yield peaks
    ended.set()
    looking.join()


@pytest.fixture(scope="module")
def deep(tiny_with):
    return tiny_with(num_hidden_layers=40)


def figures(report):
    return {measured.name: measured.value for measured in report.measurements}


def planned(folder, windows, **how):
    model = open_model(str(folder))
    chosen = choose(model, how.pop("engine", None))
    return memory.plan_memory(model, chosen, MemoryLimits(**how), windows.windows)


def between(folder, windows):
    one, other = (planned(folder, windows, walk=walk).need.memory for walk in (True, False))
    assert one < other
    return (one + other) / 2e9


def test_a_walk_evaluates_what_does_not_fit_in_the_memory_of_its_forecast_and_the_report_says_so(deep, windows):
    limit = between(deep, windows)
    report = evaluate(str(deep), **EVALUATION, memory=MemoryLimits(max_memory_gb=limit), divergence=False)
    assert report.engine.name == "reference"
    assert [measured.name for measured in report.measurements] == ["weight_bytes", "bits_per_weight", "perplexity"]
    left_out, why = report.notes
    assert left_out == "left out, since a block-by-block run generates no tokens: memory, speed"
    assert why.startswith("it was computed block by block by the reference engine: transformers would need ")
    assert why.endswith("were free")
    whole = evaluate(str(deep), **QUICK, divergence=False)
    assert (whole.engine.name, whole.notes) == ("transformers", ())
    assert figures(report)["perplexity"] == figures(whole)["perplexity"]
    model, spec, text = open_model(str(deep)), EvaluationSpec(**QUICK, divergence=False), load_text(str(SAMPLE), "e")
    need = prepare(model, spec, text, choose(model), None, MemoryLimits(walk=True)).plan.need.memory
    found = report.find("perplexity")
    peak = float(found.details["peak_rss_bytes"])  # of a small model it is that of the libraries
    assert 0.5 * need < peak < need


def test_a_walk_that_is_asked_for_has_the_whole_models_figures(gguf, tiny):
    walked = evaluate(gguf, **QUICK, memory=MemoryLimits(walk=True, offload_gb=0), source=tiny)
    assert ["block by block by the reference engine, as requested" in note for note in walked.notes] == [True, True]
    [first] = (BaselineFiles(path.stem).read_facts() for path in baseline.folder().glob("*.json"))
    for path in baseline.folder().glob("*.json"):
        BaselineFiles(path.stem).states.unlink()
        path.unlink()
    whole = evaluate(gguf, **QUICK, memory=MemoryLimits(walk=False), engine="reference", source=tiny)
    assert whole.notes == ()
    assert first == walked.baseline == whole.baseline
    assert figures(walked) == figures(whole)
    assert walked.fingerprint != whole.fingerprint


def test_what_fits_in_no_way_is_refused_before_any_work(deep, tiny, new_cache):
    with pytest.raises(ResourceError, match=r"block by block with reference would need .* for the process, .* free\."):
        evaluate(str(deep), **QUICK, memory=MemoryLimits(max_memory_gb=0.01))
    ended = fails("eval-ppl", tiny, *EVALUATION_FLAGS, "--max-memory-gb", 0.01)
    assert len(ended.err.splitlines()) == 1
    assert not new_cache.exists()


def test_an_engine_that_was_named_is_not_replaced_and_probes_that_generate_are_refused(deep, tiny, windows):
    limit = between(deep, windows)
    with pytest.raises(ResourceError, match=r"with transformers would need .* Leave --engine out, or .* --no-walk"):
        planned(deep, windows, engine="transformers", max_memory_gb=limit)
    with pytest.raises(RecipeError, match=r"transformers cannot compute block by block\. Give --engine reference"):
        planned(deep, windows, engine="transformers", walk=True)
    ours = planned(deep, windows, engine="reference", max_memory_gb=limit)
    assert (ours.engine.name, ours.engine.walk, ours.engine.dtype) == ("reference", True, "bfloat16")
    with pytest.raises(RecipeError, match="the probe speed generates tokens"):
        evaluate(str(tiny), **{**QUICK, "probes": ("speed", "perplexity")}, memory=MemoryLimits(walk=True))


def test_a_stored_baseline_takes_no_memory(gguf, tiny):
    model, source = open_model(str(gguf.folder)), open_source(str(tiny))
    spec, text = EvaluationSpec(**QUICK), load_text(str(SAMPLE), "evaluation")

    def plan():
        return prepare(model, spec, text, choose(model), source, MemoryLimits(walk=True)).baseline_plan

    assert plan().need.walk
    evaluate(gguf, **QUICK, source=tiny)
    assert plan() is None


@pytest.mark.parametrize(
    ("sizes", "walk", "divergence"), [(TALL, False, True), (TALL, True, False), (DEEP, False, False)]
)
def test_the_peak_is_as_forecast(sizes, walk, divergence, tiny_with):
    folder, memory = tiny_with(**sizes), MemoryLimits(walk=walk)
    asked = {**QUICK, "n_ctx": 512, "limit": 2, "divergence": divergence}
    model, source = open_model(str(folder)), open_source(str(folder))
    spec, text = EvaluationSpec(**asked), load_text(str(SAMPLE), "evaluation")
    evaluation = prepare(model, spec, text, choose(model), source if divergence else None, memory)
    plans = [evaluation.plan, *([evaluation.baseline_plan] if divergence else [])]
    need = max(plan.need.memory for plan in plans)
    with peaks_of_children() as peaks:
        evaluate(str(folder), **asked, memory=memory)
    print(f"\nforecast {need / 1e6:.0f} MB, measured {max(peaks.values()) / 1e6:.0f} MB")
    assert all(plan.need.walk is walk for plan in plans)
    assert 0.75 <= need / max(peaks.values()) <= 1.25


def test_a_dry_run_forecasts_both_parts_and_leaves_nothing(deep, new_cache, tmp_path):
    path = tmp_path / "forecast.json"
    ended = succeeds("eval-ppl", deep, *EVALUATION_FLAGS, "--walk", "--dry-run", "--json", path)
    values = json.loads(path.read_text())
    parts = [(part["what"], part["walk"]) for part in values["parts"]]
    assert parts == [("the source in float32", True), ("bfloat16", True)]
    assert all(0 < part["seconds"] < 600 for part in values["parts"])
    assert values["seconds"] == sum(part["seconds"] for part in values["parts"])
    positions = 2 * 31
    assert values["disk_bytes"] == positions * (32 + 2 * 128)
    assert "block by block in reference" in ended.out
    assert not list(new_cache.rglob("*.f16"))


def test_a_comparison_is_refused_before_its_first_conversion(deep, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda _device: 10_000_000)
    with pytest.raises(ResourceError, match="block by block"):
        compare(str(deep), ["rtn:4"], evaluation=EVALUATION, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
