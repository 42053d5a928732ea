"""What computes on a device does so there alone: on a GPU, or a pretended one, which refuses what mixes devices."""

import numpy as np
import pytest
from engine_logits import far_apart, logits_by
from pretended_device import NAME, REAL, pretended_device, some_device
from tiny_models import CALIBRATION

from quantkit import convert

IDS = np.arange(2, 130).reshape(2, 64)
REFINED = {"refine": True, "refine_steps": 3, "tune_steps": 2}
TEXT = {**CALIBRATION, "sequences": 32}
CASES = [
    ("one_block", "gptq", "4", {}),
    ("one_block", "gptq", "4", {"static_groups": False}),
    ("one_block", "gptq", "4", {"desc_act": True, "gptaq_share": 1.0}),
    ("one_block", "gptq", "4", {"true_sequential": False}),
    ("one_block", "gptq", "3", REFINED),
    ("one_block", "gptq", "nvfp4", {}),
    ("one_block", "gptq", "auto", {"target_bpw": 4.2}),
    ("one_block", "awq", "4", {}),
    ("one_block", "awq", "4", {"rounding": "gptq", "apply_clip": False}),
    ("one_block", "int8", "8", {}),
    ("one_block", "int8", "8", {"rounding": "nearest"}),
    ("wide", "gguf", "Q4_K_M", {"imatrix": True}),
    ("wide", "gguf", "Q3_K_M", {"rounding": "gptq"}),
    ("wide", "gguf", "Q3_K_M", {"rounding": "gptq", "awq": True}),
    ("mixtral", "gptq", "4", {"group_size": 16}),
    ("mixtral", "awq", "4", {"group_size": 16, "n_grid": 4}),
    ("gemma4", "gptq", "4", {"group_size": 16}),  # blocks share keys and values
]


def divergence(source, logits):
    """Mean KL divergence in nats of (..., V) logits from the source's."""
    theirs, ours = (each.double().log_softmax(-1) for each in (source, logits))
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@pytest.fixture
def model(request, architecture):
    def get(name):
        return request.getfixturevalue(name) if name in ("one_block", "wide") else architecture(name)

    return get


@pytest.mark.parametrize(("name", "method", "bits", "options"), CASES)
def test_a_device_converts_as_well_as_the_processor(name, method, bits, options, model, tmp_path):
    folder = model(name)
    given = (str(folder), method, bits)
    here = convert(*given, tmp_path / "here", calibration=TEXT, device="cpu", **options)
    with some_device():
        there = convert(*given, tmp_path / "there", calibration=TEXT, **options)
    source = logits_by("reference", folder, IDS)
    lost, want = (divergence(source, logits_by("reference", artifact, IDS)) for artifact in (there, here))
    assert lost == pytest.approx(want, rel=0.2, abs=1e-5)
    assert want > 1e-6


@pytest.mark.parametrize("walk", [False, True])
@pytest.mark.parametrize("name", ["one_block", "mixtral", "gemma4"])
def test_a_device_computes_what_the_processor_computes(name, walk, model, artifact_of):
    folder = model(name)
    for each in (folder, artifact_of("rtn", "4", model=folder, group_size=16)):
        with some_device():
            there = logits_by("reference", each, IDS, device=NAME, dtype="float32", walk=walk)
        assert far_apart(logits_by("reference", each, IDS, dtype="float32", walk=walk), there) < 1e-5


@pytest.mark.skipif(REAL is not None, reason="a GPU does not tell what it waits for")
@pytest.mark.parametrize("method", ["gptq", "awq", "int8", "awq, then gptq"])
def test_waits_and_transfers_do_not_grow_with_trials_and_columns(method, tiny_with, tmp_path):
    rounding = {"rounding": "gptq"} if "," in method else {}

    def spent(columns, **trials):
        model = tiny_with(num_hidden_layers=1, intermediate_size=columns)
        options = {**rounding, **(trials if method != "gptq" else {})}
        out = tmp_path / str(columns)
        with pretended_device() as costs:
            convert(str(model), method.split(",")[0], out=out, calibration=CALIBRATION, device="card", **options)
        return dict(costs)

    few, many = spent(256, n_grid=4), spent(512, n_grid=16)
    assert few.pop("bytes to the device") < many.pop("bytes to the device") < 3_000_000
    assert few.pop("bytes to the processor") < many.pop("bytes to the processor") < 1_500_000
    assert many == few
    assert few["waits"] <= 100
