from unittest.mock import Mock

import pytest
import torch
from pretended_device import REAL, _Module, pretended_device
from tiny_models import CALIBRATION, EVALUATION, prepare_job

from quantkit import convert
from quantkit.conversion.check import check
from quantkit.data.texts import load_text
from quantkit.errors import RecipeError, ResourceError
from quantkit.evaluation.engine_choice import choose
from quantkit.evaluation.evaluate import prepare
from quantkit.formats.source import open_model, open_source
from quantkit.records.recipe import EngineSpec, EvaluationSpec
from quantkit.system.device import device_label, find_device

if REAL is not None:
    pytest.skip("this machine has a GPU, beside which none can be pretended", allow_module_level=True)


@pytest.fixture
def free(monkeypatch):
    def set_to(number):
        monkeypatch.setattr(_Module, "mem_get_info", lambda _self, _device: (number, 1 << 34), raising=False)

    return set_to


def test_auto_is_the_device_that_torch_has_else_the_processor():
    assert (find_device(), find_device("cpu")) == ("cpu", "cpu")
    with pretended_device():
        found = [find_device(name) for name in ("auto", "cpu", "card", "card:0")]
        assert found == ["card", "cpu", "card", "card:0"]
        assert device_label("card") == "card"


@pytest.mark.parametrize("name", ["cuda", "card:1", "card:x", "gpu", ""])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name):
    with (
        pretended_device(),
        pytest.raises(RecipeError, match=rf"torch computes on cpu, card, card:0 here, not on '{name}'"),
    ):
        find_device(name)
    with pytest.raises(RecipeError, match=f"torch computes on cpu here, not on '{name}'"):
        find_device(name)


def test_a_device_that_does_not_compute_is_refused_and_one_without_float64_left_alone(monkeypatch):
    with pretended_device():
        monkeypatch.setattr(torch, "ones", Mock(side_effect=RuntimeError("no kernel image is available")))
        for name in ("auto", "card"):
            with pytest.raises(RecipeError, match=r"card cannot compute: no kernel image.*--device cpu"):
                find_device(name)
        monkeypatch.setattr(torch, "ones", Mock(side_effect=TypeError("this framework has no float64")))
        assert find_device() == "cpu"
        with pytest.raises(RecipeError, match="card cannot compute: this framework has no float64"):
            find_device("card")


def test_calibrated_methods_alone_compute_on_the_device_and_a_manifest_says_so(one_block, tmp_path):
    said = {}
    with pretended_device():
        for method in ("gptq", "rtn"):
            said[method] = [prepare_job(str(one_block), method, device=name).device for name in ("auto", "card")]
        made = convert(str(one_block), "gptq", out=tmp_path / "gptq", calibration=CALIBRATION)
    assert said == {"gptq": ["card", "card"], "rtn": ["cpu", "cpu"]}
    assert made.manifest.device == "card"
    assert '"device": "card"' in (made.folder / "quantkit.json").read_text()


@pytest.mark.parametrize(("asked", "engine", "computes", "baseline"), [
    ("auto", None, "card", "card"), ("auto", "ctranslate2", "cpu", "card"), ("cpu", None, "cpu", "cpu"),
    ("card", None, "card", "card"),
])  # fmt: skip
def test_engines_compute_on_the_device_and_so_does_the_baseline(
    asked, engine, computes, baseline, tiny, artifact_of, new_cache
):
    model = open_model(str(tiny))
    if engine == "ctranslate2":
        pytest.importorskip("ctranslate2", reason="the engine of this case")
        model = open_model(artifact_of("ctranslate2", "int8", model=tiny))
    spec, text = EvaluationSpec(**EVALUATION), load_text(None, "evaluation")
    with pretended_device():
        judgement = prepare(model, spec, text, choose(model, EngineSpec(device=asked)), open_source(str(tiny)))
    assert (judgement.engine.device, judgement.baseline_plan.need.device) == (computes, baseline)


def test_what_does_not_fit_into_a_gpu_is_computed_block_by_block_or_refused(tiny, free, new_cache, tmp_path):
    model, text = open_model(str(tiny)), load_text(None, "evaluation")

    def settled():
        with pretended_device():
            spec = EvaluationSpec(**EVALUATION)
            return prepare(model, spec, text, choose(model, EngineSpec()))

    free(1 << 33)
    whole = settled()
    assert not whole.engine.walk
    need = whole.plan.need.memory
    free(need - 1)
    walked = settled()
    assert (walked.engine.walk, walked.engine.device) == (True, "card")
    assert "of memory on card, and" in walked.notes[-1]
    free(1_000_000)
    with pytest.raises(ResourceError, match="of memory on card"):
        settled()
    job = prepare_job(str(tiny), "gptq", calibration=CALIBRATION, device="cpu")
    assert check(job, tmp_path / "out").forecast.on_device == 0
    with pretended_device():
        job = prepare_job(str(tiny), "gptq", calibration={**CALIBRATION, "sequences": 64, "length": 64})
        with pytest.raises(ResourceError, match=r"memory on card for .* only 1\.0 MB are free.*--device cpu"):
            check(job, tmp_path / "out")
        free(1 << 33)
        plenty = check(job, tmp_path / "out")
        assert (plenty.job.batch_tokens, plenty.forecast.on_device < 1 << 27) == (16384, True)
        free(plenty.forecast.on_device - 1)
        less = check(job, tmp_path / "out")
        assert 0 < less.forecast.on_device < plenty.forecast.on_device
        assert less.job.batch_tokens == 2048  # of 4,096 tokens in all
