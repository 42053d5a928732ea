"""INT8: smoothing keeps the model, is the best of its trials, and pays; rounding with feedback is in test_scaled.py."""

import numpy as np
import pytest
import torch
from engine_logits import engine_logits, logits_of
from tiny_llama import calibration_ids, job_for, plain_model

from quantkit.calibration.walk import walk
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine
from quantkit.errors import UnsupportedError
from quantkit.formats.source import open_model
from quantkit.methods.int8 import InputSample, _round_group, _smooth_block, rounding_noise, smoothing, storable
from quantkit.models import awq_mappings
from quantkit.models.awq_mappings import Scaling
from quantkit.models.skeleton import load, set_parameter
from quantkit.numerics.error_feedback import Feedback
from quantkit.numerics.quantized_weight import InputRounding
from quantkit.numerics.scaled_rounding import int8_with_feedback


def sample_of(x):
    sample = InputSample(1)
    sample.add(x)
    return sample


def drawn(rows, columns, seed, loud=1.0):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x[:, [1, 7, columns - 1]] *= loud
    return x


def error_of(weight, x, scale):
    """The output error with both rounded, each value by itself in float64."""
    wide, inputs = (weight * scale).double(), (x / scale).double()
    steps = (wide.float().abs().amax(1, keepdim=True) / 127).bfloat16().double()
    inner = inputs.abs().amax(1, keepdim=True) / 127
    y = (torch.round(inputs / inner) * inner) @ ((wide / steps).round().clamp(-127, 127) * steps).T
    return float((y - x.double() @ weight.double().T).square().sum())


def test_the_scale_is_the_best_of_all_trials():
    """Neither that of the weights alone nor that of the inputs alone would be."""
    draw = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(n, 32, generator=draw) * torch.randn(32, generator=draw).mul(0.5).exp() for n in (50, 24))
    scale = smoothing([weight[:16], weight[16:]], sample_of(x), 10)
    size, weights = x.abs().amax(0), weight.abs().amax(0)
    trials = [torch.ones(32), *(size**a / weights ** (1 - a) for a in (step / 10 for step in range(11)))]
    errors = [error_of(weight, x, trial / (trial.max() * trial.min()).sqrt()) for trial in trials]
    assert error_of(weight, x, scale) == pytest.approx(min(errors), rel=1e-3)
    assert min(errors) < errors[0] / 1.5


def test_nothing_is_scaled_where_that_is_best_and_heads_share_their_scales():
    weight, x = drawn(24, 32, 3) * 0.1, drawn(50, 32, 0, loud=40.0)
    assert smoothing([torch.sign(weight)], sample_of(torch.sign(x)), 10).unique().numel() == 1
    assert torch.equal(smoothing([weight], InputSample(1), 10), torch.ones(32))
    scale = smoothing([weight], sample_of(x), 10, heads=(4, 2))
    first, second = scale.view(2, 2, 8).unbind(1)
    assert torch.equal(first, second)
    assert scale.unique().numel() > 2


def test_weights_are_rounded_for_inputs_that_are_rounded(tiny_llama):
    """The Hessian that errors are fed through has the noise of the inputs on its diagonal."""
    x = drawn(200, 32, 0) @ (torch.eye(32) + drawn(32, 32, 3) / 2)
    x[:, 1] *= 1000
    weights = {"a": drawn(16, 32, 3) * 0.1, "b": drawn(8, 32, 4) * 0.1}
    hessian = x.T @ x / len(x)
    layers = _round_group(job_for(tiny_llama, "int8").job, ["a", "b"], dict(weights), hessian.clone(), sample_of(x))
    noisy = hessian + torch.eye(32) * rounding_noise(x)
    for name, weight in weights.items():
        want, without = (int8_with_feedback(weight, Feedback(moments.clone())) for moments in (noisy, hessian))
        assert torch.equal(layers[name].values, want.values)
        assert not torch.equal(layers[name].values, without.values)
    x = drawn(4000, 64, 0) * torch.linspace(1, 3, 4000)[:, None]
    added = (InputRounding("int8").rounded(x) - x).square().mean(0)
    assert rounding_noise(x) == pytest.approx(float(added.mean()), rel=0.02)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_that_takes_the_inverse_is_bfloat16_to_the_last_bit(offset):
    norm = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    norm[5] = -offset  # it multiplies with nothing
    wanted = torch.rand(64, generator=torch.Generator().manual_seed(1)) * 4 + 0.1
    scale = storable(Scaling("norm", ("a",), offset=offset), {"x.norm.weight": norm}, "x.", wanted)
    assert torch.allclose(scale, wanted, rtol=0.1 if offset else 2**-8)
    folded = (norm + offset) / scale - offset
    assert torch.allclose(folded, folded.bfloat16().float(), rtol=1e-6, atol=1e-6)
    matrix = Scaling("v", ("o",))
    assert storable(matrix, {"x.v.weight": torch.ones(4, 4)}, "x.", wanted) is wanted


def test_smoothing_and_feedback_bring_the_model_nearer(artifact_of, two_blocks):
    ids = np.random.default_rng(0).integers(2, 300, (4, 60))
    want = logits_of(plain_model(two_blocks, torch.float32), ids).double().log_softmax(-1)
    away, nearest = {}, {"rounding": "nearest"}
    for name, options in {"all": {}, "nearest": nearest, "plain": {"smooth": False, **nearest}}.items():
        artifact = artifact_of("int8", "8", model=two_blocks, **options)
        loaded = find_engine("reference").load(open_model(artifact), LoadSpec(1, 64, dtype="float32"))
        assert "inputs of quantized layers are rounded as vLLM does: 8-bit integers" in loaded.notes[0]
        ours = torch.from_numpy(engine_logits(loaded, ids)).double().log_softmax(-1)
        away[name] = float((want.exp() * (want - ours)).sum(-1).mean())
    assert away["all"] < 0.4 * away["plain"]
    assert away["nearest"] < 0.4 * away["plain"]


def test_an_architecture_without_scalings_is_refused_with_the_way_out(two_blocks, monkeypatch):
    monkeypatch.setattr(awq_mappings, "MAPPINGS", {})
    monkeypatch.setattr(awq_mappings, "OFFSETS", ())
    monkeypatch.setattr(awq_mappings, "FUSED", ())
    with pytest.raises(UnsupportedError, match=r"no layer in the blocks of 'llama' can be scaled .*: give --no-smooth"):
        job_for(two_blocks, "int8")
    job_for(two_blocks, "int8", smooth=False)


def test_a_sample_takes_every_nth_token_and_the_largest_of_all():
    x = drawn(10, 8, 0, loud=40.0)
    sample = InputSample(3)
    sample.add(x[:4].bfloat16())
    sample.add(x[4:4])
    sample.add(x[4:].bfloat16())
    assert torch.equal(torch.cat(sample.parts), x.bfloat16().float()[[0, 3, 4, 7]])
    assert sample.largest is not None
    assert torch.equal(sample.largest, x.bfloat16().float().abs().amax(0))
    joined = sample.joined([InputSample(3)])
    assert torch.equal(torch.cat(joined.parts), torch.cat(sample.parts))
    assert torch.equal(joined.largest, sample.largest)


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt"])
def test_smoothing_keeps_the_model(name, architecture, tmp_path):
    """All is folded, nothing rounded but norms and biases: the same outputs, though the weights have changed."""
    folder = architecture(name)
    trial = job_for(folder, "int8", tmp_path)
    model, ids = plain_model(folder, torch.float32), calibration_ids(trial)[:2]
    before = logits_of(model, ids)
    changed = 0.0
    for block in walk(trial.job, trial.run):
        values = {
            block.prefix + key: load(trial.source, trial.job.skeleton, block.prefix + key).float()
            for key, _ in block.module.named_parameters()
        }
        samples = {names[0]: InputSample(1) for names in block.groups()}
        hessians = block.hessians(block.groups(), lambda key, x, samples=samples: samples[key].add(x))
        x = {key: torch.cat(sample.parts) for key, sample in samples.items()}
        folds = awq_mappings.provable_scalings(trial.job.skeleton, trial.source.config)[block.index]
        _smooth_block(trial.job, block, folds, values, hessians, samples)
        for key, sample in samples.items():
            # Hessians and samples are those of the scaled inputs.
            part = torch.cat(sample.parts)
            assert torch.allclose(hessians[key], part.T @ part / len(part), rtol=0.05, atol=0.02 * part.square().max())
            changed = max(changed, float((part - x[key]).abs().max()))
        for key, value in values.items():
            stored = value if key in block.linears else value.bfloat16().float()
            if value.ndim == 1 and not key.endswith("bias") and name != "gemma2":
                assert torch.allclose(stored, value, rtol=1e-6)
            set_parameter(model, key, stored)
    assert changed > 0.1
    after = logits_of(model, ids)
    assert (after - before).abs().max() < 0.01 * before.abs().max()
