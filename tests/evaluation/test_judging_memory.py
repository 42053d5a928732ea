"""Whole or block by block: what is forecast, what is refused, and that the figures are the same."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_architectures import ARCHITECTURES, HIDDEN, LAYERS
from tiny_llama import VOCABULARY
from tiny_models import EVALUATION, EVALUATION_FLAGS, SAMPLE, Ended, quantkit

from quantkit.artifact import Artifact
from quantkit.contracts.model import Model
from quantkit.contracts.registry import engines, probes
from quantkit.contracts.windows import Cut
from quantkit.data.texts import load_text
from quantkit.errors import RecipeError, ResourceError
from quantkit.evaluation import baseline
from quantkit.evaluation.baseline import BaselineFiles
from quantkit.evaluation.engine_choice import choose
from quantkit.evaluation.evaluate import evaluate, prepare
from quantkit.evaluation.forecast import memory
from quantkit.evaluation.forecast.dry_run import forecast
from quantkit.evaluation.protocols import cut
from quantkit.formats.source import open_model
from quantkit.progress import Progress, Step
from quantkit.recipe import EngineSpec, EvaluationSpec, WalkSpec
from quantkit.report.records import Report
from quantkit.sweep.compare import compare
from quantkit.system.memory import GROWTH

QUICK: dict[str, Any] = {**EVALUATION, "probes": ("perplexity",)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def deep(tiny_with: Callable[..., Path]) -> Path:
    """A model most of whose weights lie in its many blocks."""
    return tiny_with(num_hidden_layers=40)


@pytest.fixture(scope="module")
def windows(tiny: Path) -> Cut:
    return cut(load_text(str(SAMPLE), "evaluation"), open_model(str(tiny)).tokenizer(), "llama.cpp", 32, 6)


def figures(report: Report) -> dict[str, float]:
    return {measured.name: measured.value for measured in report.measurements}


def settled(folder: Path, windows: Cut, **how: Any) -> memory.Settled:
    engine = how.pop("engine", None)
    model = open_model(str(folder))
    chosen = choose(model, EngineSpec(engine=engine))
    return memory.settle(model, chosen, WalkSpec(**how), windows.windows, None, lambda: False, "transformers")


def between(folder: Path, windows: Cut) -> float:
    """GB that a walk fits into and the whole model does not."""
    one, other = (settled(folder, windows, walk=walk).model.memory for walk in (True, False))
    assert one is not None
    assert other is not None
    assert one < other
    return (one + other) / 2e9


def test_a_walk_judges_what_does_not_fit_in_the_memory_of_its_forecast_and_the_report_says_so(
    deep: Path, windows: Cut
) -> None:
    limit = between(deep, windows)
    report = evaluate(str(deep), **EVALUATION, max_memory_gb=limit, divergence=False)
    assert report.engine.name == "reference"
    assert [measured.name for measured in report.measurements] == ["weight_bytes", "bits_per_weight", "perplexity"]
    left_out, why = report.notes
    assert left_out == "left out, since a walk generates no tokens: memory, speed"
    assert why.startswith("it was computed block by block by our own reader: transformers would need ")
    assert why.endswith("were free")
    whole = evaluate(str(deep), **QUICK, divergence=False)
    assert (whole.engine.name, whole.notes) == ("transformers", ())
    assert figures(report)["perplexity"] == figures(whole)["perplexity"]
    model, spec, text = open_model(str(deep)), EvaluationSpec(**QUICK, divergence=False), load_text(str(SAMPLE), "e")
    need = prepare(model, spec, text, choose(model, EngineSpec()), None, WalkSpec(walk=True)).settled.model.memory
    found = report.find("perplexity")
    assert need is not None
    assert found is not None
    peak = float(found.details["peak_rss_bytes"])  # of a small model it is that of the libraries
    print(f"\nforecast {need / 1e6:.0f} MB, measured {peak / 1e6:.0f} MB")
    assert 0.5 * need < peak < need


def test_a_walk_that_is_asked_for_has_the_whole_models_figures(gguf: Artifact, tiny: Path) -> None:
    walked = evaluate(gguf, **QUICK, walk=True, offload_gb=0, source=tiny)
    notes = walked.notes
    assert len(notes) == 2
    assert all("block by block by our own reader, as was asked for" in note for note in notes)
    [first] = (BaselineFiles(path.stem).read_facts() for path in baseline.folder().glob("*.json"))
    for path in baseline.folder().glob("*.json"):
        BaselineFiles(path.stem).states.unlink()
        path.unlink()
    whole = evaluate(gguf, **QUICK, walk=False, engine="reference", source=tiny)
    assert whole.notes == ()
    assert first == walked.baseline == whole.baseline
    assert figures(walked) == figures(whole)
    assert walked.fingerprint != whole.fingerprint


def test_what_fits_in_no_way_is_refused_before_any_work(deep: Path, tiny: Path, cache: Path) -> None:
    with pytest.raises(ResourceError, match=r"block by block with reference would need .* for the process, .* free\."):
        evaluate(str(deep), **QUICK, max_memory_gb=0.01)
    ended = quantkit("eval-ppl", tiny, *EVALUATION_FLAGS, "--max-memory-gb", 0.01)
    assert ended.code == 1
    assert len(ended.err.splitlines()) == 1
    assert not cache.exists()


def test_an_engine_that_was_named_is_not_replaced(deep: Path, windows: Cut) -> None:
    limit = between(deep, windows)
    with pytest.raises(ResourceError, match=r"with transformers would need .* Leave --engine out, or .* --no-walk"):
        settled(deep, windows, engine="transformers", max_memory_gb=limit)
    with pytest.raises(RecipeError, match=r"transformers does not compute block by block\. Take --engine reference"):
        settled(deep, windows, engine="transformers", walk=True)
    assert not settled(deep, windows, engine="transformers", max_memory_gb=limit, walk=False).engine.walk
    ours = settled(deep, windows, engine="reference", max_memory_gb=limit)
    assert (ours.engine.name, ours.engine.walk, ours.engine.dtype) == ("reference", True, "bfloat16")


def test_probes_that_generate_are_refused_where_they_are_named(tiny: Path) -> None:
    with pytest.raises(RecipeError, match="the probe speed generates tokens"):
        evaluate(str(tiny), **{**QUICK, "probes": ("speed", "perplexity")}, walk=True)
    assert {name for name, probe in probes().items() if not probe.generates} == {"size", "perplexity"}


def test_a_card_has_no_forecast(tiny: Path, windows: Cut) -> None:
    model = open_model(str(tiny))
    chosen = replace(choose(model, EngineSpec()), device="cuda")
    on_card = memory.settle(
        model, chosen, WalkSpec(max_memory_gb=0.01), windows.windows, None, lambda: False, "transformers"
    )
    assert (on_card.engine, on_card.model.memory) == (chosen, None)


def test_sizes_of_all_architectures_are_known() -> None:
    for tiny in ARCHITECTURES.values():
        config = getattr(transformers, tiny.config)(vocab_size=VOCABULARY, **tiny.settings).to_dict()
        ends = memory.ends_of(config)
        assert (ends.vocabulary, ends.hidden) == (VOCABULARY, HIDDEN), tiny.config
        assert ends.inner >= HIDDEN // 2
        assert ends.blocks == tiny.settings.get("num_hidden_layers", LAYERS)
        # Each of the four blocks has 32 values of the text, and two of them share keys and values of two heads.
        beside = {"gemma4": 4 * 32 + 2 * 2 * (16 + 32), "gemma3n": 3 * HIDDEN + 4 * 32 + 2 * 2 * (16 + 16)}
        shares = "num_kv_shared_layers" in tiny.settings
        assert ends.flowing == HIDDEN + (beside[tiny.kind.removesuffix("_text")] if shares else 0)
        assert ends.tables == HIDDEN + (4 * 32 if shares else 0)


def test_engines_say_what_they_hold(gguf: Artifact, tiny: Path) -> None:
    """Two bytes a weight in bfloat16, four in float32, the file's where the engine keeps codes."""
    source, artifact = memory.holding_of(open_model(str(tiny))), memory.holding_of(Model(gguf, None))
    holds = {name: engine.holds for name, engine in engines().items() if engine.holds is not None}
    assert sorted(holds) == ["ctranslate2", "llamacpp", "reference", "transformers"]
    assert holds["transformers"](source, None) == 2 * source.parameters
    assert holds["transformers"](source, "float32") == 4 * source.parameters
    assert holds["reference"](source, "float32") == 4 * source.parameters
    assert holds["llamacpp"](artifact, None) == gguf.manifest.weight_bytes
    assert artifact.parameters == source.parameters


# Sizes of `tiny`: rows of the embedding, width, weights of a block, and those of its largest layer.
ROWS, WIDTH, BLOCK, LAYER = 304, 128, 2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128 + 2 * 128, 256 * 128
FLOWING = 8 * WIDTH + 4 * 3 * WIDTH  # values of a token inside a block
SOURCE_HEAD = 5_000_000


@pytest.mark.parametrize(
    ("made", "waves", "source_head"),
    [(False, 1, SOURCE_HEAD), (False, 3, 0), (False, 3, SOURCE_HEAD), (True, 3, SOURCE_HEAD)],
)
def test_a_walk_takes_the_sum_of_what_it_holds_at_once(
    made: bool, waves: int, source_head: int, gguf: Artifact, tiny: Path, windows: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second wave on both output layers, its own and the source's, lie beside the next windows' blocks."""
    tokens = 6 * 32 // waves
    monkeypatch.setattr("quantkit.calibration.passes.WAVE_TOKENS", tokens)
    model = Model(gguf, None) if made else open_model(str(tiny))
    dtype, computed = ("bfloat16", 2) if made else ("float32", 4)
    # A source's weights are read in their 2 bytes, an artifact's are unpacked: outside the blocks to 4 bytes.
    stored, unpacked, own_head = 4 if made else 2, 17 if made else 2, ROWS * WIDTH * 2
    for offload_bytes, kept in ((1 << 30, tokens * WIDTH * computed), (0, 0)):
        heads = own_head + source_head if waves > 1 else 0
        embedding = tokens * WIDTH * (stored + 2 * computed) + (ROWS * WIDTH * stored if made else 0)
        block = BLOCK * computed + LAYER * unpacked + 2048 * FLOWING * computed
        logits = 3 * 256 * ROWS * 4
        assert memory.walked(model, dtype, windows.windows, offload_bytes, source_head).phases == {
            "the embedding": kept + heads + embedding,
            "a decoder block": kept + heads + block + GROWTH,
            "the output layer": kept + own_head + ROWS * WIDTH * stored + source_head + logits + GROWTH,
        }


def test_a_dry_run_forecasts_both_parts_and_leaves_nothing(deep: Path, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "forecast.json"
    ended = quantkit("eval-ppl", deep, *EVALUATION_FLAGS, "--walk", "--dry-run", "--json", path)
    assert ended.code == 0, ended.err
    values = json.loads(path.read_text())
    assert [(part["what"], part["walk"]) for part in values["parts"]] == [
        ("the source in float32", True), ("bfloat16", True),
    ]  # fmt: skip
    assert all(0 < part["seconds"] < 600 for part in values["parts"])
    assert values["seconds"] == sum(part["seconds"] for part in values["parts"])
    positions = 2 * 31
    assert values["disk_bytes"] == positions * (32 + 2 * 128)
    assert "block by block in reference" in ended.out
    assert not list(cache.rglob("*.f16"))
    whole = forecast(str(deep), **EVALUATION, divergence=False)
    [part] = whole.parts
    assert (part.need.walk, part.need.engine) == (False, "transformers")
    assert 0 < part.seconds < 600


def test_a_dry_run_of_all_probes_names_what_is_not_forecast(tiny: Path, tmp_path: Path) -> None:
    def dry(*flags: str) -> Ended:
        return quantkit("eval", tiny, *EVALUATION_FLAGS, "--no-divergence", "--dry-run", *flags)

    whole, walked, without = dry(), dry("--walk"), dry("--probes", "size,speed")
    assert (whole.code, walked.code) == (0, 0), whole.err + walked.err
    assert "block by block in reference" in walked.out
    assert "it is more by that of memory, speed" in " ".join(whole.out.split())
    assert "it is more by" not in walked.out  # which generates nothing
    assert without.code != 0
    assert "size, speed was asked for" in " ".join(without.err.split())


class StopComparing(Exception):  # noqa: N818 - ends a comparison at its first conversion
    pass


def said(model: Path, out: Path) -> list[str]:
    """What a comparison says before its first conversion."""
    lines: list[str] = []

    def stop(step: Step) -> None:
        if step.title.endswith("variants"):
            raise StopComparing

    recipe = {"evaluation": EVALUATION, "out": out, "progress": Progress(stop, lines.append)}
    with pytest.raises(StopComparing):
        compare(str(model), ["rtn:4", "gguf:Q8_0"], **recipe)
    return [line for line in lines if line.startswith("judged")]


def test_a_comparison_says_before_its_first_conversion_what_is_judged_how(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [line] = said(deep, tmp_path / "out")
    whole = (
        r"judged whole: the source for divergences, bfloat16 by transformers; rtn-4 by reference; "
        r"gguf-Q8_0 by llamacpp; at most (0\.\d\d) GB"
    )
    largest = re.fullmatch(whole, line)
    assert largest is not None, line
    model, text = open_model(str(deep)), load_text(str(SAMPLE), "evaluation")
    spec, chosen = EvaluationSpec(**EVALUATION), choose(model, EngineSpec())
    walked, plain = (prepare(model, spec, text, chosen, None, WalkSpec(walk=how)).settled for how in (True, False))
    limit = max(need.memory or 0 for need in (walked.baseline, walked.model))
    assert limit < (plain.baseline.memory or 0)
    assert largest[1] == f"{max(need.memory or 0 for need in (plain.baseline, plain.model)) / 1e9:.2f}"
    monkeypatch.setattr(memory, "available_memory", lambda: limit)
    by_block = said(deep, tmp_path / "out")[-1]
    assert by_block.startswith("judged block by block, since memory is short for all of it: the source for divergences")
    assert "(reference, block by block, 0." in by_block
    assert "rtn-4 (whole: reference, 0." in by_block
    monkeypatch.setattr(memory, "available_memory", lambda: 10_000_000)
    with pytest.raises(ResourceError, match="block by block"):
        compare(str(deep), ["rtn:4"], evaluation=EVALUATION, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
