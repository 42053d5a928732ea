"""Scales tuned end to end: the gradient against autograd through the whole model, and what tuning gains."""

from dataclasses import replace

import pytest
import torch
from tiny_llama import SEQUENCES, calibration_ids, job_for, plain_model

from quantkit.calibration import scale_tuning as module
from quantkit.calibration.activations import Activations
from quantkit.calibration.scale_tuning import Tuning, tune
from quantkit.methods.rtn import round_layer
from quantkit.models.skeleton import load
from quantkit.numerics.grouped_weight import GroupedWeight

GROUP, LENGTH = 32, 16


def rounded(job):
    """Every linear layer of a model, plainly rounded to 3 bits; every second row of it has negative scales."""
    layers = {}
    for name in job.skeleton.linears():
        layer = round_layer(load(job.source, job.skeleton, name).float(), 3, GROUP, True)
        codes, scales = layer.codes.clone(), layer.scales.clone()
        codes[::2], scales[::2] = (8 - codes[::2].int()).clamp(max=7).to(torch.uint8), -scales[::2]
        layers[name] = replace(layer, codes=codes, scales=scales)
    return layers


def values_of(layers):
    return lambda prefix: {name: layer for name, layer in layers.items() if name.startswith(prefix)}


def outputs_of(trial):
    """What comes out of the source's last block."""
    model = plain_model(trial.source.folder)
    outputs = []
    model.model.layers[-1].register_forward_hook(lambda _m, _args, out: outputs.append(out))
    with torch.no_grad():
        model(input_ids=calibration_ids(trial))
    [states] = outputs
    store = Activations(*states.shape[-3:], states=len(states) if states.ndim == 4 else 0)
    store.write(0, states)
    return store


def divergence_of(model, layers, ids):
    """Mean divergence of the quantized whole model from the source, differentiable by the layers' scales."""
    exact, ours = plain_model(model), plain_model(model)
    values = {}
    for name, layer in layers.items():
        zeros = layer.zeros.float()[:, layer.g_idx]
        values[name] = ((layer.codes.float() - zeros) * layer.scales[:, layer.g_idx]).to(torch.bfloat16)
    with torch.no_grad():
        theirs = exact(input_ids=ids).logits.float().log_softmax(-1)
    logits = torch.func.functional_call(ours, values, kwargs={"input_ids": ids}).logits.float().log_softmax(-1)
    return (theirs.exp() * (theirs - logits)).sum(-1).mean()


# The last blocks of Gemma 4 take the keys and values of others, and all have inputs of the text; 3n also has four
# hidden states of each token side by side.
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma4", "gemma3n"])
def test_the_gradient_is_that_of_the_whole_model(name, architecture, tmp_path, monkeypatch):
    model = architecture(name)
    trial = job_for(model, "gptq", tmp_path, length=LENGTH, group_size=GROUP)
    layers = rounded(trial.job)
    seen = {}
    plain = module._Scales.step

    def step(scales, gradient, rate, count):
        seen[id(scales)] = gradient
        plain(scales, gradient, rate, count)

    monkeypatch.setattr(module._Scales, "step", step)
    monkeypatch.setattr(module, "BATCH_TOKENS", SEQUENCES * LENGTH)
    monkeypatch.setattr(module, "PASS_TOKENS", 4 * LENGTH)  # the last part of the batch is smaller
    students = []
    start = module._Student.__init__
    monkeypatch.setattr(
        module._Student, "__init__", lambda self, *given: (students.append(self), start(self, *given))[1]
    )
    tune(trial.job, trial.run, values_of(layers), Tuning(1), outputs_of(trial))
    order = torch.randperm(SEQUENCES - SEQUENCES // module.HELD_OUT.share, generator=torch.Generator().manual_seed(0))
    trained = [i for i in range(SEQUENCES) if (i + 1) % module.HELD_OUT.share]
    ids = calibration_ids(trial)[[trained[i] for i in order.tolist()]]
    leaves = {
        name: GroupedWeight(x.codes, x.scales.float().requires_grad_(), x.zeros, x.g_idx, x.bits)
        for name, x in layers.items()
    }
    divergence_of(model, leaves, ids).backward()
    for name, leaf in leaves.items():
        want = leaf.scales.grad * leaf.scales.detach()
        got = seen[id(students[0].scales[name])]
        assert (got - want).norm() < 0.05 * want.norm(), name


@pytest.mark.parametrize(("bits", "pace"), [(2, 4), (3, 2), (4, 1)])
def test_adam_steps_are_those_of_torch(bits, pace):
    layer = round_layer(torch.randn(3, 32, generator=torch.Generator().manual_seed(1)), bits, 8, True)
    scales = module._Scales(layer)
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    adam = torch.optim.Adam([parameter], lr=0.01 * pace, betas=module.BETAS, eps=1e-12)
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 6):
        parameter.grad = torch.randn(3, 4, generator=generator)
        scales.step(parameter.grad.clone(), 0.01, count)
        adam.step()
        assert torch.allclose(scales.stretch, parameter.detach(), atol=1e-6)


def test_tuning_brings_the_model_nearer_to_its_source(one_block, tmp_path):
    trial = job_for(one_block, "gptq", tmp_path, length=LENGTH, group_size=GROUP)
    layers, ids, targets = rounded(trial.job), calibration_ids(trial), outputs_of(trial)
    tuned, again = (tune(trial.job, trial.run, values_of(layers), Tuning(20, 5e-3), targets) for _ in range(2))
    assert set(tuned) == set(layers)
    better = {name: GroupedWeight(x.codes, tuned[name].half(), x.zeros, x.g_idx, x.bits) for name, x in layers.items()}
    with torch.no_grad():
        before, after = (divergence_of(one_block, each, ids) for each in (layers, better))
    assert float(after) < 0.9 * float(before)
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(value, again[name]) for name, value in tuned.items())
    # Scales stay where nothing gets better.
    for name, scales in tune(trial.job, trial.run, values_of(layers), Tuning(3, 0.9), targets).items():
        assert torch.equal(scales.half(), layers[name].scales)
