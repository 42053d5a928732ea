"""Scales tuned end to end: the gradient against autograd through the whole model, and what tuning gains."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_architectures import ARCHITECTURES, save_architecture, whole_model
from tiny_llama import LENGTH, SEQUENCES, calibration_ids, converted, job_for, plain_model

from quantkit.artifact import open_artifact
from quantkit.calibration import scale_tuning as module
from quantkit.calibration.activations import Activations
from quantkit.calibration.inputs import Head
from quantkit.calibration.scale_tuning import Tuning, tune
from quantkit.checkpoints.writer import stored_tensors
from quantkit.contracts.method import Job
from quantkit.formats.source import open_source
from quantkit.methods.rtn import round_layer
from quantkit.models.skeleton import load, open_skeleton
from quantkit.numerics.grouped_weight import GroupedWeight

GROUP = 32
# Scales that leave something to gain.
POOR: dict[str, dict[str, object]] = {
    "gptq": {"scale_search": False, "refit": False, "asymmetric": False},
    "awq": {"clip": False},
}


def rounded(job: Job) -> dict[str, GroupedWeight]:
    """Every linear layer of a model, plainly rounded to 3 bits."""
    skeleton = open_skeleton(job.source.config)
    return {name: round_layer(load(job.source, skeleton, name).float(), 3, GROUP, True) for name in skeleton.linears()}


def values_of(layers: dict[str, GroupedWeight]) -> Callable[[str], dict[str, torch.Tensor | GroupedWeight]]:
    return lambda prefix: {name: layer for name, layer in layers.items() if name.startswith(prefix)}


def job_in(folder: Path, model: Path) -> Job:
    job = job_for(model, "gptq", group_size=GROUP)
    job.folder = folder
    return job


def outputs_of(job: Job) -> Activations:
    """What comes out of the source's last block."""
    model = plain_model(job.source.folder)
    kept: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _m, args: kept.append(args[0]))
    with torch.no_grad():
        model(input_ids=calibration_ids(job))
    found = Activations(*kept[0].shape)
    found.write(0, kept[0])
    return found


def divergence_of(model: Path, layers: dict[str, GroupedWeight], ids: torch.Tensor) -> torch.Tensor:
    """Mean divergence of the quantized whole model from the source, differentiable by the layers' scales."""
    exact, ours = plain_model(model), plain_model(model)
    values = {}
    for name, layer in layers.items():
        zeros = layer.zeros.float()[:, layer.g_idx]
        values[name] = ((layer.codes.float() - zeros) * layer.scales[:, layer.g_idx]).to(torch.bfloat16)
    with torch.no_grad():
        wanted = exact(input_ids=ids).logits.float().log_softmax(-1)
    found = torch.func.functional_call(ours, values, kwargs={"input_ids": ids}).logits.float().log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).mean()


@pytest.mark.parametrize("fixture", ["tiny_llama", "tiny_llama_with_biases", "tiny_llama_untied"])
def test_the_gradient_is_that_of_the_whole_model(
    fixture: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = request.getfixturevalue(fixture)
    job = job_in(tmp_path, model)
    layers = rounded(job)
    seen: dict[int, torch.Tensor] = {}
    plain = module._Scales.step

    def step(scales: module._Scales, gradient: torch.Tensor, rate: float, count: int) -> None:
        seen[id(scales)] = gradient
        plain(scales, gradient, rate, count)

    monkeypatch.setattr(module._Scales, "step", step)
    monkeypatch.setattr(module, "BATCH_TOKENS", SEQUENCES * LENGTH)
    held: list[module._Blocks] = []
    monkeypatch.setattr(module, "_step", lambda blocks, *rest: (held.append(blocks), original(blocks, *rest))[1])
    tune(job, values_of(layers), Tuning(1), outputs_of(job))
    order = torch.randperm(SEQUENCES - SEQUENCES // module.HELD_OUT, generator=torch.Generator().manual_seed(0))
    trained = [i for i in range(SEQUENCES) if (i + 1) % module.HELD_OUT]
    ids = calibration_ids(job)[[trained[i] for i in order.tolist()]]
    leaves = {
        name: GroupedWeight(x.codes, x.scales.float().requires_grad_(), x.zeros, x.g_idx, x.bits)
        for name, x in layers.items()
    }
    divergence_of(model, leaves, ids).backward()  # type: ignore[no-untyped-call]
    for name, leaf in leaves.items():
        assert leaf.scales.grad is not None
        want = leaf.scales.grad * leaf.scales.detach()
        got = seen[id(held[0].scales[name])]
        assert (got - want).norm() < 0.05 * want.norm(), name


original = module._step


def test_adam_steps_are_those_of_torch() -> None:
    scales = module._Scales(torch.full((3, 4), 0.5))
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    adam = torch.optim.Adam([parameter], lr=0.01, betas=module.BETAS, eps=1e-12)
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 6):
        parameter.grad = torch.randn(3, 4, generator=generator)
        scales.step(parameter.grad.clone(), 0.01, count)
        adam.step()
        assert torch.allclose(scales.stretch, parameter.detach(), atol=1e-6)


def test_tuning_brings_the_model_nearer_to_its_source(tiny_llama: Path, tmp_path: Path) -> None:
    job = job_in(tmp_path, tiny_llama)
    layers, ids = rounded(job), calibration_ids(job)
    targets = outputs_of(job)
    tuned = tune(job, values_of(layers), Tuning(20, 5e-3), targets)
    assert set(tuned) == set(layers)
    better = {name: GroupedWeight(x.codes, tuned[name].half(), x.zeros, x.g_idx, x.bits) for name, x in layers.items()}
    with torch.no_grad():
        before, after = divergence_of(tiny_llama, layers, ids), divergence_of(tiny_llama, better, ids)
    assert float(after) < 0.9 * float(before)
    assert list(tmp_path.iterdir()) == []
    again = tune(job, values_of(layers), Tuning(20, 5e-3), targets)
    assert all(torch.equal(value, again[name]) for name, value in tuned.items())


def test_scales_stay_where_nothing_gets_better(tiny_llama: Path, tmp_path: Path) -> None:
    job = job_in(tmp_path, tiny_llama)
    layers = rounded(job)
    for name, scales in tune(job, values_of(layers), Tuning(3, 0.9), outputs_of(job)).items():
        assert torch.equal(scales.half(), layers[name].scales)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_the_head_gives_the_models_own_logits(name: str, tmp_path: Path) -> None:
    source = open_source(str(save_architecture(tmp_path, name)))
    model = whole_model(tmp_path, torch.bfloat16)
    skeleton = open_skeleton(source.config)
    last = model.get_submodule(f"{skeleton.blocks_path}.{len(skeleton.blocks) - 1}")
    outs: list[object] = []
    last.register_forward_hook(lambda _m, _a, out: outs.append(out))
    with torch.no_grad():
        want = model(input_ids=torch.arange(40)[None] % 60).logits[0]
        as_tuple = isinstance(outs[0], tuple)
        hidden = outs[0][0] if isinstance(outs[0], tuple) else outs[0]
        assert isinstance(hidden, torch.Tensor)
        got = Head(source, torch.device("cpu")).logits(hidden[0], as_tuple)
    assert torch.equal(got, want)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_tuned_artifact_differs_from_an_untuned_one_in_its_scales_alone(
    method: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Tuning", partial(Tuning, rate=5e-3))
    options = {"group_size": GROUP, "refine": True, "refine_steps": 0, **POOR[method]}
    plain = converted(tiny_llama, tmp_path / "plain", method, tune_steps=0, **options)
    tuned = converted(tiny_llama, tmp_path / "tuned", method, tune_steps=10, **options)
    (names, before), (others, after) = stored_tensors(plain), stored_tensors(open_artifact(tuned.folder))
    assert names == others
    changed = {name.rpartition(".")[2] for name in names if not torch.equal(before(name), after(name))}
    assert changed == {"scales"}
    assert tuned.manifest.options["tune_steps"] == 10
