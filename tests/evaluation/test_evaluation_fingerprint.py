import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_reports import BASELINE
from tiny_models import EVALUATION, SAMPLE

from quantkit import evaluate
from quantkit.data.texts import load_text
from quantkit.evaluation import evaluate as evaluation
from quantkit.evaluation.baseline import key_of
from quantkit.evaluation.engine_choice import choose
from quantkit.evaluation.evaluate import prepare
from quantkit.evaluation.perplexity import RECORD
from quantkit.evaluation.protocols import cut
from quantkit.formats.source import open_model, open_source
from quantkit.records.recipe import EngineSpec, EvaluationSpec
from quantkit.records.report import this_machine
from quantkit.system.progress import Progress

ROOM = Path(evaluation.__file__).parent  # not all of the package
TEXT = load_text(str(SAMPLE), "evaluation")


@pytest.fixture
def prepared(tiny):
    model = open_model(str(tiny))
    return prepare(model, EvaluationSpec(**EVALUATION), TEXT, choose(model, EngineSpec()))


def installed(package, number, place, patch):
    facts = place / f"{package.replace('-', '_')}-{number}.dist-info" / "METADATA"
    facts.parent.mkdir(parents=True)
    facts.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")
    patch.syspath_prepend(str(place))


def with_file(name, **changes):
    def change(given, place, _):
        copy = Path(shutil.copytree(given.model.folder, place / given.model.name))
        values = json.loads((copy / name).read_text()) if (copy / name).exists() else {}
        (copy / name).write_text(json.dumps(values | changes))
        return replace(given, model=open_model(str(copy)))

    return change


def setting(**changes):
    return lambda given, _, __: replace(given, spec=given.spec.model_copy(update=changes))


def engine(**changes):
    return lambda given, _, __: replace(given, engine=replace(given.engine, **changes))


def machine(**changes):
    def change(given, _, patch):
        other = this_machine().model_copy(update=changes)
        patch.setattr(evaluation, "this_machine", lambda: other)
        return given

    return change


CHANGES = {
    "model": [with_file("config.json", rms_norm_eps=1e-4)],
    "ends": [with_file("generation_config.json", eos_token_id=[2, 7])],
    "text": [
        lambda given, _, __: replace(given, text=replace(given.text, content=given.text.content + "\n")),
        lambda given, _, __: replace(given, text=replace(given.text, name="another.txt")),
    ],
    "windows": [
        lambda given, _, __: replace(given, cut=cut(given.text, given.model.tokenizer(), "llama.cpp", 64, 1))
    ],
    "settings": [setting(threads=(1, 2)), setting(repeats=4)],
    "engine": [engine(version="0.0.1"), engine(dtype="float32"), engine(device="cuda"), engine(walk=True)],
    "python": [engine(python="/other/bin/python")],
    "variables": [lambda given, _, patch: patch.setenv("ATEN_CPU_CAPABILITY", "default") or given],
    "versions": [lambda given, place, patch: installed("torch", "99.0", place, patch) or given],
    "code": [lambda given, _, patch: patch.setattr(evaluation, "PACKAGE", ROOM) or given],
    "hardware": [machine(cpu="Another CPU"), machine(cores=1000)],
}  # fmt: skip


@pytest.mark.parametrize("part", CHANGES)
def test_each_part_makes_another_fingerprint(part, prepared, tmp_path, monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    before, fingerprint = prepared.decides(BASELINE), prepared.fingerprint(BASELINE)
    assert prepared.fingerprint(BASELINE) == fingerprint
    for change in CHANGES[part]:
        with monkeypatch.context() as patch:
            other = change(prepared, tmp_path, patch)
            after = other.decides(BASELINE)
            differing = {key for key in before if before[key] != after[key]}
            assert differing == {part}
            assert other.fingerprint(BASELINE) != fingerprint


def test_another_baseline_makes_another_fingerprint_and_no_part_is_forgotten_above(prepared):
    others = [None, *(BASELINE.model_copy(update=change) for change in ({"dtype": "bfloat16"}, {"sha256": "bb" * 32}))]
    assert len({prepared.fingerprint(kept) for kept in (BASELINE, *others)}) == 4
    assert {*CHANGES, "baseline"} == set(prepared.decides(BASELINE))


def test_variables_that_change_what_an_engine_computes_count(prepared, monkeypatch):
    monkeypatch.setenv("UNRELATED", "1")
    own = {"ctranslate2": "CT2_USE_MKL", "llamacpp": "GGML_X", "vllm": "VLLM_X", "transformers": "BNB_X"}
    for name, variable in own.items():
        chosen = replace(prepared.engine, name=name)
        before = chosen.variables
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            assert sorted({*chosen.variables} - {*before}) == [f"{variable}=1"], name
        assert "UNRELATED=1" not in before


def test_each_part_makes_another_baseline(prepared, tmp_path, monkeypatch):
    source, windows = open_source(str(prepared.model.folder)), prepared.cut

    def key(hashes=None, dtype="float32", **about):
        source.hashes = hashes or plain
        return key_of(source, replace(windows, about=windows.about.model_copy(update=about)), dtype)

    plain = dict(source.hashes)
    assert set(plain) == {"config.json", "model.safetensors"}
    keys = [key(), key(dtype="bfloat16"), *(key({**plain, name: "00" * 32}) for name in plain)]
    keys += [key(tokens_sha256="00" * 32), key(protocol="papers"), key(scored=5)]
    assert key(n_ctx=99) == keys[0]  # the tokens tell
    installed("transformers", "99.0", tmp_path / "site", monkeypatch)
    keys.append(key())
    monkeypatch.setattr("quantkit.evaluation.baseline.FORMAT", 99)
    keys.append(key())
    assert len({*keys}) == len(keys)


@pytest.mark.parametrize("changed", [False, True])
def test_stored_positions_are_used_only_if_nothing_else_has_changed(changed, gguf, tmp_path, monkeypatch):
    many = {**EVALUATION, "limit": 40, "divergence": False}  # 32 windows are a batch
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "quiet"))
    quiet = evaluate(gguf, ("perplexity",), **many).find("perplexity").value
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))

    def interrupt(step):
        if step.done >= 35:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(gguf, ("perplexity",), **many, progress=Progress(interrupt))
    [stored] = (tmp_path / "cache" / "evaluations").glob("*.positions")
    assert stored.stat().st_size >= 32 * 31 * RECORD.itemsize
    if changed:
        installed("numpy", "0.0.1", tmp_path / "site", monkeypatch)
    seen = []
    again = evaluate(gguf, ("perplexity",), **many, progress=Progress(lambda step: seen.append(step.done)))
    first = min(done for done in seen if done)
    assert first == 1 if changed else first >= 32
    assert stored.exists() == changed
    assert again.find("perplexity").value == pytest.approx(quiet, rel=1e-9)


def test_a_report_carries_the_fingerprint_of_its_evaluation(gguf, tiny):
    report = evaluate(gguf, ("perplexity",), **EVALUATION, source=tiny)
    model, spec = open_model(gguf), EvaluationSpec(**EVALUATION, probes=("perplexity",))
    again = prepare(model, spec, TEXT, choose(model, EngineSpec()), open_source(str(tiny)))
    assert report.baseline is not None
    assert again.stored_baseline() == report.baseline
    assert report.fingerprint == again.fingerprint(report.baseline)
    assert again.fingerprint(None) != report.fingerprint


@pytest.mark.usefixtures("no_hub")
def test_without_a_text_the_part_for_evaluation_is_taken(gguf):
    report = evaluate(gguf, ("size",), **EVALUATION | {"text": None})
    assert report.text.name == "quantkit's bundled sample, evaluation part"
