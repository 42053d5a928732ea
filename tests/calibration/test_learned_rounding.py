"""Learned rounding: its gradients against autograd through a straight-through estimator, and what it gains."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_llama import job_for

from quantkit.calibration.block import Block
from quantkit.calibration.learned_rounding import Training, _Latent, refine
from quantkit.calibration.walk import walk
from quantkit.errors import RecipeError
from quantkit.methods.gptq import METHOD as GPTQ
from quantkit.methods.rtn import round_layer
from quantkit.models.skeleton import load
from quantkit.numerics.grouped_weight import GroupedWeight

GROUP = 32


class Round(torch.autograd.Function):
    """Rounding whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad


def random_layer(symmetric: bool) -> tuple[torch.Tensor, GroupedWeight]:
    """Of a symmetric one every second row has negative scales."""
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    layer = round_layer(weight, 4, GROUP, symmetric)
    if symmetric:
        layer.codes[::2], layer.scales[::2] = (16 - layer.codes[::2].int()).clamp(max=15).byte(), -layer.scales[::2]
    return weight, layer


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_step_follows_the_signs_that_autograd_gives(symmetric: bool) -> None:
    weight, layer = random_layer(symmetric)
    latent = _Latent(layer, weight, margin=0.1)
    position = latent.position.clone().requires_grad_()
    stretch = torch.zeros_like(latent.stretch, requires_grad=True)
    scale = (latent.scale * (1 + stretch)).repeat_interleave(GROUP, 1)
    value = (Round.apply(position) - latent.zero) * scale
    assert torch.equal(value.detach(), latent.value())
    loss = (value - weight).pow(2).sum() + value.sum()
    gradient = torch.autograd.grad(loss, value, retain_graph=True)[0]
    loss.backward()
    latent.step(gradient, 0.01, 0.001)
    assert position.grad is not None
    assert stretch.grad is not None
    assert torch.allclose(latent.position, (position - 0.01 * position.grad.sign()).clamp(-0.49, 15.49).detach())
    assert torch.allclose(latent.stretch, -0.001 * stretch.grad.sign())


Rounded = tuple[Block, dict[str, GroupedWeight], dict[str, torch.Tensor]]


@pytest.fixture
def rounded_block(tiny_with: Callable[..., Path]) -> Iterator[Rounded]:
    """A block of the tiny llama, plainly rounded to 3 bits, with its layers and their weights."""
    trial = job_for(tiny_with(num_hidden_layers=1), "gptq", length=16)
    blocks = walk(trial.job, trial.run, exact=1.0)
    block = next(blocks)
    weights = {name: load(trial.source, block.skeleton, name).float() for name in block.linears}
    layers = {name: round_layer(weight, 3, 64, symmetric=True) for name, weight in weights.items()}
    for name, layer in layers.items():
        block.replace(name, layer.dense())
    yield block, layers, weights
    blocks.close()


def block_error(block: Block, targets: torch.Tensor) -> float:
    with torch.no_grad():
        out = block.call(block.module, block.inputs, range(len(block.inputs))).float()
    return float(((out - targets.float()).square().mean(-1) / targets.float().square().mean(-1)).mean())


def test_the_block_comes_nearer_to_the_exact_one(rounded_block: Rounded) -> None:
    block, layers, weights = rounded_block
    targets = block.targets().read().clone()
    before = block_error(block, targets)
    refined = refine(block, layers, weights, Training(40, code_rate=0.01, scale_rate=0.004, margin=0.02), seed=0)
    assert block_error(block, targets) < 0.85 * before
    for name, layer in refined.items():
        assert torch.equal(block.linears[name].weight, layer.dense().bfloat16())
        assert int(layer.codes.max()) <= 7
        assert torch.equal(layer.zeros, layers[name].zeros)
    assert any(bool((refined[name].codes != layers[name].codes).any()) for name in layers)


def test_a_solution_that_training_only_harms_is_given_back(rounded_block: Rounded) -> None:
    block, layers, weights = rounded_block
    refined = refine(block, layers, weights, Training(10, code_rate=3.0, scale_rate=0.9), seed=0)
    for name, layer in layers.items():
        assert torch.equal(refined[name].codes, layer.codes)
        assert torch.equal(refined[name].scales, layer.scales)


def test_too_few_sequences_are_refused_before_work(tiny_llama: Path) -> None:
    job = job_for(tiny_llama, "gptq", refine=True).job
    few = job.recipe.calibration.model_copy(update={"sequences": 15})
    job = job.changed(recipe=job.recipe.model_copy(update={"calibration": few}))
    with pytest.raises(RecipeError, match=r"holds out one calibration sequence in 8 and needs 16 or more; 15 were"):
        GPTQ.check(job)
