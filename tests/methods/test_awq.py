"""AWQ: errors against explicit inputs, scales against a slow search, and whole models that must not change."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_llama import HEADS, KV_HEADS, LINEARS, any_scale, calibration_ids, converted, hessian_of, job_for, plain_model
from transformers.models.llama.modeling_llama import repeat_kv
from trials import read_back

from quantkit.calibration import channel_scales
from quantkit.calibration.channel_scales import output_error, repeat_heads, scale_block, search_scale, share_heads
from quantkit.methods import awq
from quantkit.methods.awq import PlainRounding, refitted
from quantkit.models.awq_mappings import provable_scalings
from quantkit.models.skeleton import open_skeleton
from quantkit.numerics.error_feedback import Feedback
from quantkit.numerics.scale_refit import PartedHessian

FREE = (1, 1)
GROUP = 64
NORMS = ("input_layernorm", "post_attention_layernorm")


def layer_and_inputs(seed=0, rows=64, columns=128):
    """A weight (rows, columns) and inputs (tokens, columns) of which four channels are thirty times larger."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(500, columns, generator=generator)
    x[:, [3, 40, 70, 100]] *= 30
    return torch.randn(rows, columns, generator=generator) * 0.05, x


def explicit_error(change, x):
    """Mean over tokens of the squared length of the output's change, in float64."""
    return float((x.double() @ change.double().T).square().sum(1).mean())


def rounded(weight, scale):
    return PlainRounding(GROUP).round(weight * scale, torch.ones(len(scale))).dense() / scale


@pytest.mark.parametrize("panel", [48, 128])
def test_the_output_error_is_that_of_explicit_inputs(panel, monkeypatch):
    monkeypatch.setattr(channel_scales, "PANEL", panel)  # of 128 columns
    weight, x = layer_and_inputs()
    change = rounded(weight, torch.ones(128)) - weight
    assert float(output_error(change, x.T @ x / len(x))) == pytest.approx(explicit_error(change, x), rel=1e-4)


def test_heads_share_by_mean_and_repeat_side_by_side():
    values = torch.tensor([1.0, 10.0, 3.0, 30.0, 5.0, 50.0, 9.0, 90.0])  # four query heads of two channels
    assert share_heads(values, 4, 2).tolist() == [2.0, 20.0, 7.0, 70.0]
    for heads in (FREE, (4, 4)):
        assert torch.equal(share_heads(values, *heads), values)
        assert torch.equal(repeat_heads(values, *heads), values)
    # As the attention of transformers does it.
    values = torch.randn(KV_HEADS * 8, generator=torch.Generator().manual_seed(0))
    theirs = repeat_kv(values.reshape(1, KV_HEADS, 1, 8), HEADS // KV_HEADS).reshape(-1)
    assert torch.equal(repeat_heads(values, HEADS, KV_HEADS), theirs)


def clipped(weight, scale, importance):
    """The scaled weight on a 4-bit grid of the best of five ranges, group by group, and scaled back."""
    values = weight.numpy() * scale.numpy()
    h = (importance / scale.square()).numpy()
    out = np.empty_like(values)
    for row, one in enumerate(values):
        for start in range(0, len(one), GROUP):
            w, own = one[start : start + GROUP], h[start : start + GROUP]
            low, high = min(float(w.min()), 0.0), max(float(w.max()), 0.0)
            least = np.inf
            for share in (1, 0.925, 0.85, 0.775, 0.7):
                step = np.float32(np.float16((high - low) / 15 * share))
                zero = np.clip(np.rint(-low * share / step), 0, 15)
                back = (np.clip(np.rint(w / step) + zero, 0, 15) - zero) * step
                error = float((own * (back - w) ** 2).sum())
                if error < least:
                    out[row, start : start + GROUP], least = back, error
    return torch.from_numpy(out) / scale


@pytest.mark.parametrize(("seed", "clip"), [(1, False), (0, True)])
def test_the_scale_is_the_best_of_all_trials_on_explicit_inputs(seed, clip):
    weights, x = [layer_and_inputs(seed)[0], layer_and_inputs(seed + 10, rows=32)[0]], layer_and_inputs(seed)[1]
    points = 10
    scale = search_scale(weights, x.T @ x / len(x), [PlainRounding(GROUP, clip=clip).tried] * 2, points, FREE)
    importance, size = x.square().mean(0), torch.cat(weights).abs().mean(0)
    rms = importance.sqrt()
    trials = {(kind, 0): torch.ones(128) for kind in "xw"}
    trials |= {("x", i): rms ** (i / points) for i in range(1, points + 1)}
    trials |= {("w", i): rms ** (i / points) / size ** (1 - i / points) for i in range(1, points + 1)}
    trials = {key: trial / (trial.max() * trial.min()).sqrt() for key, trial in trials.items()}

    def error(trial):
        made = [clipped(w, trial, importance) if clip else rounded(w, trial) for w in weights]
        return sum(explicit_error(one - w, x) for one, w in zip(made, weights, strict=True))

    errors = {key: error(trial) for key, trial in trials.items()}
    kind, point = min((key for key in trials if key[1] in (0, 2, 6, 10)), key=errors.__getitem__)
    best = min((key for key in trials if key[0] == kind and abs(key[1] - point) < 4), key=errors.__getitem__)
    assert errors[best] < (0.7 if clip else 0.5) * errors["x", 0]
    assert errors[best] < 1.05 * min(errors.values())
    assert torch.allclose(scale, trials[best], rtol=1e-4)


@pytest.mark.parametrize(("seed", "clip"), [(0, False), (1, True)])
def test_a_diagonal_alone_is_the_hessian_of_nothing_else(seed, clip):
    weight, x = layer_and_inputs(seed)
    costs = x.square().mean(0)
    rounding = [PlainRounding(GROUP, clip=clip).tried]
    wanted = search_scale([weight], torch.diag(costs), rounding, 20, FREE)
    assert not torch.equal(wanted, torch.ones(128))
    assert torch.equal(search_scale([weight], costs, rounding, 20, FREE), wanted)
    change = rounded(weight, wanted) - weight
    assert float(output_error(change, costs)) == pytest.approx(
        float((change.double().square() * costs).sum()), rel=1e-6
    )


@pytest.mark.parametrize(("rounds", "symmetric", "bits"), [(1, False, 4), (3, True, 4), (2, True, 3), (3, False, 3)])
def test_scales_are_fitted_to_the_outputs_and_weights_rounded_by_them_anew(rounds, symmetric, bits, units):
    """Row by row against a general least-squares solver on the inputs themselves."""
    weight, x = layer_and_inputs()
    x = x @ torch.linalg.qr(torch.randn(128, 128, generator=torch.Generator().manual_seed(5)))[0]  # all correlated
    hessian = x.T @ x / len(x)
    plain = PlainRounding(GROUP, symmetric, bits, clip=True).round(weight, torch.diagonal(hessian))
    got = refitted(weight, PartedHessian(hessian), plain, rounds)
    assert torch.equal(got.zeros, plain.zeros)
    assert rounds > 1 or torch.equal(got.codes, plain.codes)
    total = 0.0
    for row, aim in enumerate(weight.double()):
        zeros = plain.zeros[row].double().repeat_interleave(GROUP)
        codes, error = plain.codes[row].double(), float("inf")
        for _ in range(rounds):
            parts = ((codes - zeros) * x.double()).view(len(x), -1, GROUP).sum(2)
            fitted = torch.linalg.lstsq(parts, (x.double() @ aim)[:, None]).solution[:, 0].half().double()
            new = float((parts @ fitted - x.double() @ aim).square().mean())
            if new < error:
                error, scales = new, fitted
            codes = ((aim / scales.repeat_interleave(GROUP)).round() + zeros).clamp(0, 2**bits - 1)
        total += error
    # From 4 bits on, later rounds take the first one's equations, and here scales have far to go.
    near = 0.01 if bits < 4 else (0.01, 0.05, 0.1)[rounds - 1]
    assert explicit_error(got.dense() - weight, x) == pytest.approx(total, rel=near)
    before, after = (explicit_error(layer.dense() - weight, x) for layer in (plain, got))
    assert after < (0.9, 0.85, 0.85)[rounds - 1] * before


def test_refitting_and_its_rounds_can_be_left_out(one_block, tmp_path):
    """The first layers of the first block have the same inputs in all runs."""
    runs = [{"refit": False}, {"rounds": 1}, {}]
    scales = set()
    for number, options in enumerate(runs):
        made = converted(one_block, tmp_path / f"{number}", "awq", length=16, group_size=GROUP, n_grid=2, **options)
        scales.add(str(read_back(made)[LINEARS[0]].scales.tolist()))
    assert len(scales) == len(runs)


def scaled_blocks(job, model):
    """Scale every block of a float32 `model` as AWQ does, from Hessians of plain hooks; return those that it gave."""
    ids, skeleton = calibration_ids(job), open_skeleton(job.source.config)
    claimed = {}
    for i, module in enumerate(model.model.layers):
        prefix = f"model.layers.{i}."
        values = {prefix + name: value.detach().clone() for name, value in module.named_parameters()}
        block = SimpleNamespace(prefix=prefix, moments=SimpleNamespace(tokens={}), input_scales={})
        first = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
        hessians = {f"{prefix}{name}.weight": hessian_of(model, f"{prefix}{name}.weight", ids) for name in first}
        scalings = provable_scalings(skeleton, job.source.config)[i]
        scale_block(job, block, scalings, values, hessians, awq._search(job))
        with torch.no_grad():
            for name, value in values.items():
                model.get_parameter(name).copy_(value)
        claimed |= hessians
    return claimed


@pytest.mark.parametrize(("changes", "search"), [
    ({}, search_scale),
    ({"attention_bias": True, "mlp_bias": True}, any_scale),
    ({"num_key_value_heads": 4}, any_scale),
    ({"num_key_value_heads": 1}, any_scale),
], ids=["grouped heads", "biases", "all heads", "one head"])  # fmt: skip
def test_scaling_alone_does_not_change_the_model(changes, search, tiny_with, monkeypatch):
    monkeypatch.setattr(channel_scales, "search_scale", search)
    folder = tiny_with(dtype=torch.float32, num_hidden_layers=1, **changes)
    job = job_for(folder, "awq", group_size=GROUP, rounding="nearest").job
    model = plain_model(folder, torch.float32)
    ids, before = calibration_ids(job), {name: value.detach().clone() for name, value in model.named_parameters()}
    with torch.no_grad():
        want = model(ids).logits
        claimed = scaled_blocks(job, model)
        got = model(ids).logits
    assert (got - want).abs().max() < 2e-4 * want.abs().max()
    for name, value in model.named_parameters():
        if search is any_scale and (name in LINEARS or name.endswith(NORMS)):
            assert (value - before[name]).norm() > 0.3 * before[name].norm()
    for name, hessian in claimed.items():
        seen = hessian_of(model, name, ids)
        assert (hessian - seen).norm() < 1e-4 * seen.norm()


def test_trials_count_what_error_feedback_leaves(one_block, tmp_path, monkeypatch):
    seen = {"nearest": [], "gptq": []}
    for rounding, given in seen.items():

        def noted(weights, hessian, *others, given=given):
            given.append(hessian.clone())
            return search_scale(weights, hessian, *others)

        monkeypatch.setattr(channel_scales, "search_scale", noted)
        converted(one_block, tmp_path / rounding, "awq", group_size=GROUP, n_grid=2, rounding=rounding)
    hessian, costs = seen["nearest"][0], seen["gptq"][0]  # the first layers have the same inputs in both
    assert torch.equal(costs, Feedback(hessian.clone()).costs)
    assert [each.ndim for each in seen["gptq"]] == [1] * 4


def test_scales_before_error_feedback_are_searched_on_a_share(one_block):
    def searched(rounding, name="q_proj"):
        job = job_for(one_block, "awq", rounding=rounding).job
        block = SimpleNamespace(inputs=torch.zeros(96, 64, 128), linears={name: torch.nn.Linear(128, 8)})
        return awq._search(job).sequences(block)

    assert searched("gptq") == 32  # a quarter are 24, and 16 go through a block together
    assert searched("nearest") is searched("gptq", "mlp.experts.0.up_proj") is None


def test_trials_clip_by_what_scaled_inputs_weigh(monkeypatch):
    weight, x = layer_and_inputs()
    hessian = x.T @ x / len(x)

    def noted(rounding, scaled, importance, quick):
        scale = (scaled / weight).median(0).values
        assert torch.allclose(importance, torch.diagonal(hessian) / scale.square(), rtol=1e-3)
        return plain(rounding, scaled, importance, quick)

    plain = PlainRounding.round
    monkeypatch.setattr(PlainRounding, "round", noted)
    search_scale([weight], hessian, [PlainRounding(GROUP, clip=True).tried], 4, FREE)


@pytest.mark.parametrize("clip", [False, True])
def test_trials_clip_where_the_rounding_does(clip, one_block, tmp_path, monkeypatch):
    trials = []
    roundings = []

    def noted(rounding, weight, importance, quick=False):
        (trials if quick else roundings).append(rounding.clip)
        return plain(rounding, weight, importance, quick)

    plain = PlainRounding.round
    monkeypatch.setattr(PlainRounding, "round", noted)
    converted(one_block, tmp_path / "out", "awq", group_size=GROUP, n_grid=2, apply_clip=clip, rounding="nearest")
    assert set(trials) == {clip}
    assert roundings == [clip] * 7  # layers
