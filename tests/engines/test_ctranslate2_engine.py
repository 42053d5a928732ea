import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_logits import engine_logits
from tiny_ct2 import config_of, convert, reference_log_probs, save_checkpoint
from transformers import AutoModelForCausalLM

from quantkit.artifact import Artifact
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.engines.ctranslate2 import ENGINE, Ct2Generator, compute_type_for, saturates
from quantkit.errors import ArtifactError, DependencyError, EngineError, UnsupportedError
from quantkit.evaluation.engine_choice import refusal
from quantkit.formats.source import open_source

SPEC = LoadSpec(threads=1, n_ctx=512)
SUPPORTED = {"int8", "int8_float32", "float32"}
VOCABULARY = 304


@pytest.fixture(scope="module")
def float32(artifact_of: Callable[..., Artifact]) -> Artifact:
    return artifact_of("ctranslate2", "float32")


@pytest.fixture(scope="module")
def loaded(float32: Artifact) -> Ct2Generator:
    return Ct2Generator(float32.folder, "float32", 1)


def argmax_loop(checkpoint: Path, ids: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokens = list(ids)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(ids) :]


def test_logits_are_the_log_probabilities_of_transformers(float32: Artifact, tiny: Path) -> None:
    model = ENGINE.load(Model(float32, None), SPEC)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (3, 40))
    logits = engine_logits(model, ids)
    assert (logits.dtype, logits.shape) == (np.float32, (3, 40, VOCABULARY))
    got = torch.log_softmax(torch.from_numpy(logits), -1)
    assert (got - reference_log_probs(tiny, torch.from_numpy(ids))).abs().max() < 2e-5
    assert (model.dtype, model.notes) == ("float32", ())
    assert np.array_equal(engine_logits(model, ids, first=26), logits[:, 26:])


@pytest.mark.parametrize("prompt", [[5], [5, 6, 7, 8, 9, 10]])
def test_stream_equals_the_argmax_loop_of_transformers(prompt: list[int], loaded: Ct2Generator, tiny: Path) -> None:
    assert list(loaded.stream(prompt, 40)) == argmax_loop(tiny, prompt, 40)


def test_stream_goes_on_after_the_end_token(float32: Artifact, tiny: Path, tmp_path: Path) -> None:
    want = argmax_loop(tiny, [5, 6, 7], 20)
    folder = Path(shutil.copytree(float32.folder, tmp_path / "copy"))
    vocabulary = json.loads((folder / "vocabulary.json").read_text())
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "eos_token": vocabulary[want[3]]}))
    assert list(Ct2Generator(folder, "float32", 1).stream([5, 6, 7], 20)) == want


def test_stream_gives_tokens_as_they_are_made_and_can_be_left(loaded: Ct2Generator) -> None:
    stream: Any = loaded.stream([5, 6], 400)
    first = [next(stream), next(stream)]
    stream.close()
    assert list(loaded.stream([5, 6], 2)) == first


@pytest.mark.parametrize(
    ("ids", "message"),
    [([VOCABULARY], "leave the vocabulary"), ([-1, 3], "leave the vocabulary"), ([], "at least one")],
)
def test_ids_that_would_crash_the_engine_are_refused(ids: list[int], message: str, loaded: Ct2Generator) -> None:
    with pytest.raises(EngineError, match=message):
        loaded.window(ids)
    with pytest.raises(EngineError, match=message):
        list(loaded.stream(ids, 3))


def test_a_window_that_the_engine_refuses_is_told(tmp_path: Path) -> None:
    config = config_of("MistralConfig", sliding_window=2048, max_position_embeddings=4096)
    job = convert(save_checkpoint(tmp_path / "source", config), "float32", tmp_path / "out")
    with pytest.raises(EngineError, match="window of 2049 tokens"):
        Ct2Generator(job.folder, "float32", 1).window([1] * 2049)


@pytest.mark.parametrize(
    ("bits", "supported", "want"),
    [
        ("int8", SUPPORTED, "int8_float32"),
        ("int8_bfloat16", SUPPORTED | {"int8_bfloat16"}, "int8_bfloat16"),
        ("int8", {"float32"}, "float32"),
        ("int16", SUPPORTED, "float32"),
        ("int16", SUPPORTED | {"int16"}, "int16"),
        ("float16", SUPPORTED, "float32"),
    ],
)
def test_compute_type_keeps_the_values(bits: str, supported: set[str], want: str) -> None:
    assert compute_type_for(bits, supported) == want


@pytest.mark.parametrize(
    ("cpuinfo", "want"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx avx2 fma\n", True),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f avx512_vnni\n", False),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx avx2 fma\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp\n", False),
    ],
)
def test_processors_whose_int8_products_saturate_are_known(cpuinfo: str, want: bool) -> None:
    assert saturates(cpuinfo) is want


def test_the_compute_type_can_be_chosen_and_saturating_products_are_told(
    float32: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    for saturated, kind in ((True, "int8_float32"), (True, "float32"), (False, "int8_float32")):
        monkeypatch.setattr("quantkit.engines.ctranslate2.saturates", lambda saturated=saturated: saturated)
        model = ENGINE.load(Model(float32, None), LoadSpec(1, 512, kind))
        assert model.dtype == kind
        assert any("saturate" in note for note in model.notes) is (saturated and kind == "int8_float32")
    with pytest.raises(UnsupportedError, match="cannot compute in float64"):
        ENGINE.refuse("float64", "cpu")


def test_a_kind_that_the_processor_lacks_is_told(artifact_of: Callable[..., Artifact]) -> None:
    model = ENGINE.load(Model(artifact_of("ctranslate2", "float16"), None), SPEC)
    assert model.dtype == "float32"
    assert model.notes == ("stored as float16, computed in float32 on this CPU",)


def test_only_its_own_artifacts_are_opened(float32: Artifact, tiny: Path) -> None:
    assert refusal(ENGINE, Model(float32, None)) is None
    assert refusal(ENGINE, Model(None, open_source(str(tiny)))) == ENGINE.opens


@pytest.mark.parametrize(
    ("name", "damage"), [("model.bin", lambda data: data[:-50]), ("vocabulary.json", lambda _: b"[")]
)
def test_damaged_files_are_refused(name: str, damage: Any, float32: Artifact, tmp_path: Path) -> None:
    path = Path(shutil.copytree(float32.folder, tmp_path / "copy")) / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ArtifactError, match=name):
        Ct2Generator(path.parent, "float32", 1)


def test_a_missing_package_is_told_with_its_pip_line(float32: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(DependencyError, match=r"quantkit\[ctranslate2\]"):
        Ct2Generator(float32.folder, "float32", 1)


def test_running_a_model_imports_neither_torch_nor_transformers(float32: Artifact) -> None:
    code = (
        "import sys, pathlib\n"
        "from quantkit.engines.ctranslate2 import Ct2Generator\n"
        "model = Ct2Generator(pathlib.Path(sys.argv[1]), 'float32', 1)\n"
        "model.window([1] * 4); list(model.stream([5], 3))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules], flush=True)\n"
        "import os; os._exit(0)\n"  # as the worker ends: the engine's threads may abort an ordinary exit
    )
    done = subprocess.run([sys.executable, "-c", code, str(float32.folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""
