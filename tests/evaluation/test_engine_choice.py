import os
import site
from unittest.mock import patch

import numpy as np
import pytest
import torch
from environments import packages_of, put_empty, put_installed, python_in
from tiny_models import EVALUATION, SAMPLE

from quantkit import convert, evaluate
from quantkit.errors import DependencyError, RecipeError
from quantkit.evaluation.engine_choice import NEEDED, choose
from quantkit.formats.source import open_model
from quantkit.records.recipe import EngineSpec
from quantkit.serving.launch import serving
from quantkit.serving.servers import plan_server

VLLM_PYTHON = os.environ.get("QUANTKIT_VLLM_PYTHON")


def put_another_quantkit(folder):
    (folder / "quantkit").mkdir()
    (folder / "quantkit" / "__init__.py").write_text("raise RuntimeError('another quantkit')", encoding="utf-8")


def test_another_interpreter_runs_this_code_on_its_own_packages(gguf, bare, tmp_path):
    packages = packages_of(bare)
    (packages / "ours.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    put_another_quantkit(packages)  # which gives way to the one that asks
    # No sitecustomize: that of Debian's own Python comes before an environment's.
    (packages / "note.pth").write_text(
        f"import sys; open({str(tmp_path / 'ran')!r}, 'a').write(' '.join(sys.orig_argv) + '\\n')", encoding="utf-8"
    )
    how = {**EVALUATION, "divergence": False}
    there = evaluate(gguf, ["perplexity"], engine=EngineSpec(python=python_in(bare)), **how)
    ran = (tmp_path / "ran").read_text(encoding="utf-8")
    assert "-m quantkit.evaluation.worker" in ran
    here = evaluate(gguf, ["perplexity"], **how)
    assert there.find("perplexity").value == here.find("perplexity").value
    assert there.engine == here.engine
    assert (tmp_path / "ran").read_text(encoding="utf-8") == ran


def test_what_an_interpreter_lacks_is_told_before_any_work(gguf, bare):
    python = python_in(bare)
    with pytest.raises(
        DependencyError, match=rf"engine llamacpp is not installed for {python}.*quantkit-lm\[llamacpp\]"
    ):
        evaluate(gguf, ["perplexity"], engine=EngineSpec(python=python))
    packages = packages_of(bare)
    put_empty(packages, "llama_cpp", *(name for name in NEEDED if name not in ("yaml", "psutil")))
    with pytest.raises(DependencyError, match=rf"{python} -m pip install psutil PyYAML$"):
        evaluate(gguf, ["perplexity"], engine=EngineSpec(python=python))
    with pytest.raises(DependencyError, match=r"the interpreter /none .* cannot be run"):
        evaluate(gguf, ["perplexity"], engine=EngineSpec(python="/none"))


@pytest.mark.parametrize(("options", "says"), [
    ({"device": "cuda:1"}, "--device cuda:1 for the engine llamacpp: this llama-cpp-python computes on cpu"),
    ({"dtype": "float32"}, "llama.cpp computes in the file's own types; leave the dtype 'float32' out"),
    ({"device": "cuda:1", "engine": "reference"}, "reference: torch computes on cpu here, not on 'cuda:1'"),
    ({"engine": "vllm"}, "the engine vllm cannot open gguf-Q8_0"),
])  # fmt: skip
def test_what_an_engine_does_not_have_is_refused_before_any_work(gguf, options, says):
    if torch.cuda.is_available() and "cuda" in options.get("device", ""):
        pytest.skip("this machine has a card")
    with patch("quantkit.evaluation.evaluate.run_child", side_effect=AssertionError("work before the refusal")):  # noqa: SIM117
        with pytest.raises(RecipeError, match=says):
            evaluate(gguf, ["perplexity"], engine=EngineSpec(**options))


def test_a_plugin_of_vllm_that_is_missing_or_old_is_told_before_any_work(artifact_of, bare):
    pytest.importorskip("bitsandbytes")
    python, packages, nf4 = python_in(bare), packages_of(bare), open_model(artifact_of("nf4", "4"))
    put_empty(packages, "vllm", "psutil", "yaml", *(name for name in NEEDED if name not in ("yaml", "psutil")))
    for version, has in ((None, "none"), ("0.0.2", "0.0.2"), ("0.0.3", None)):
        if version is not None:
            put_installed(packages, {"vllm-bnb-plugin": version, "bitsandbytes": "0.50.2"})
        if has is None:
            assert choose(nf4, EngineSpec(engine="vllm", python=python)).python == python
            continue
        says = rf"needs vllm-bnb-plugin>=0.0.3, and {python} has {has}. Install it with: {python} -m pip .*--no-deps"
        with pytest.raises(DependencyError, match=says):
            choose(nf4, EngineSpec(engine="vllm", python=python))
        plan = plan_server(str(nf4.folder), "vllm", python=python)
        with pytest.raises(DependencyError, match=says), serving(plan):
            pass


def test_a_folder_of_its_name_is_no_engine(gguf, tiny, bare, tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    put_another_quantkit(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DependencyError, match="engine vllm is not installed"):
        choose(open_model(str(tiny)), EngineSpec(engine="vllm", python=python_in(bare)))
    monkeypatch.delenv("PYTHONPATH")
    assert evaluate(gguf, ["size"]).find("weight_bytes") is not None


@pytest.mark.skipif(VLLM_PYTHON is None, reason="QUANTKIT_VLLM_PYTHON does not name an interpreter that has vLLM")
@pytest.mark.parametrize("method", [None, "rtn"])
def test_vllm_agrees_with_our_reader(tmp_path, method, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    # Its kernels end with SIGILL on tiny shapes.
    model = "demo" if method is None else convert("demo", method, "4", out=tmp_path / "made", group_size=64)
    settings = {"text": str(SAMPLE), "limit": 3, "threads": [1], "max_tokens": 8, "repeats": 1}
    probes = ["perplexity", "memory", "throughput", "answers"]
    theirs = evaluate(model, probes, engine=EngineSpec(engine="vllm", python=VLLM_PYTHON), **settings)
    ours = evaluate(model, ["perplexity"], engine="reference", **settings)
    for name in ("perplexity", "kld"):
        a, b = theirs.find(name), ours.find(name)
        np.testing.assert_allclose(a.value, b.value, rtol=0.02, atol=2e-3)
    assert {m.name for m in theirs.measurements} >= {"peak_rss_bytes", "pp512@1", "tg128@1", "answers_ttft_ms@1"}
    assert theirs.engine.version[0].isdigit()
