import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_logits import engine_logits
from tiny_ct2 import reference_log_probs
from transformers import AutoModelForCausalLM

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.engines.ctranslate2 import ENGINE, Ct2Generator, compute_type_for, saturates
from quantkit.errors import ArtifactError, EngineError

SPEC = LoadSpec(threads=1, n_ctx=512)
SUPPORTED = {"int8", "int8_float32", "float32"}
VOCABULARY = 304


@pytest.fixture(scope="module")
def float32(artifact_of):
    return artifact_of("ctranslate2", "float32")


@pytest.fixture(scope="module")
def loaded(float32):
    return Ct2Generator(float32.folder, "float32", 1)


def argmax_loop(checkpoint, ids, count):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokens = list(ids)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(ids) :]


def test_logits_are_the_log_probabilities_of_transformers(float32, tiny):
    model = ENGINE.load(Model(float32, None), SPEC)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (3, 40))
    logits = engine_logits(model, ids)
    assert (logits.dtype, logits.shape) == (np.float32, (3, 40, VOCABULARY))
    got = torch.log_softmax(torch.from_numpy(logits), -1)
    assert (got - reference_log_probs(tiny, torch.from_numpy(ids))).abs().max() < 2e-5
    assert (model.dtype, model.notes) == ("float32", ())
    assert np.array_equal(engine_logits(model, ids, first=26), logits[:, 26:])


def test_stream_equals_the_argmax_loop_of_transformers_also_after_the_end_token(float32, loaded, tiny, tmp_path):
    want = argmax_loop(tiny, [5, 6, 7], 20)
    assert list(loaded.stream([5, 6, 7], 20)) == want
    folder = Path(shutil.copytree(float32.folder, tmp_path / "copy"))
    vocabulary = json.loads((folder / "vocabulary.json").read_text())
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "eos_token": vocabulary[want[3]]}))
    assert list(Ct2Generator(folder, "float32", 1).stream([5, 6, 7], 20)) == want
    stream = loaded.stream([5, 6, 7], 400)
    assert [next(stream), next(stream)] == want[:2]
    stream.close()  # it can be left


@pytest.mark.parametrize(("ids", "message"), [([VOCABULARY], "are outside the vocabulary"), ([], "at least one")])
def test_ids_that_would_crash_the_engine_are_refused(ids, message, loaded):
    with pytest.raises(EngineError, match=message):
        loaded.window(ids)
    with pytest.raises(EngineError, match=message):
        list(loaded.stream(ids, 3))


def test_compute_types_keep_the_values_and_processors_whose_int8_products_saturate_are_known():
    kinds = {"int8": "int8_float32", "int16": "float32", "float16": "float32"}
    assert {bits: compute_type_for(bits, SUPPORTED) for bits in kinds} == kinds
    assert compute_type_for("int8_bfloat16", SUPPORTED | {"int8_bfloat16"}) == "int8_bfloat16"
    assert saturates("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx avx2 fma\n") is True
    assert saturates("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f avx512_vnni\n") is False
    assert saturates("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx avx2 fma\n") is False
    assert saturates("processor\t: 0\nFeatures\t: fp asimd asimddp\n") is False


def test_the_compute_type_can_be_chosen_and_what_the_processor_lacks_is_told(float32, monkeypatch, artifact_of):
    for saturated, kind in ((True, "int8_float32"), (True, "float32"), (False, "int8_float32")):
        monkeypatch.setattr("quantkit.engines.ctranslate2.saturates", lambda saturated=saturated: saturated)
        model = ENGINE.load(Model(float32, None), LoadSpec(1, 512, kind))
        assert model.dtype == kind
        assert any("saturate" in note for note in model.notes) is (saturated and kind == "int8_float32")
    model = ENGINE.load(Model(artifact_of("ctranslate2", "float16"), None), SPEC)
    assert model.dtype == "float32"
    assert model.notes == ("stored as float16, computed in float32 on this CPU",)


def test_a_cut_file_is_refused(float32, tmp_path):
    path = Path(shutil.copytree(float32.folder, tmp_path / "copy")) / "model.bin"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ArtifactError, match=path.name):
        Ct2Generator(path.parent, "float32", 1)


def test_running_a_model_imports_neither_torch_nor_transformers(float32):
    code = (
        "import os, sys, pathlib\n"
        "from quantkit.engines.ctranslate2 import Ct2Generator\n"
        "list(Ct2Generator(pathlib.Path(sys.argv[1]), 'float32', 1).stream([5], 3))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules], flush=True)\n"
        "os._exit(0)\n"  # as the worker ends: the engine's threads may abort an ordinary exit
    )
    done = subprocess.run([sys.executable, "-c", code, str(float32.folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""
