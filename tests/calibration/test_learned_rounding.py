"""Learned rounding: its gradients against autograd through a straight-through estimator, and what it gains."""

from dataclasses import replace

import pytest
import torch
from tiny_llama import job_for

from quantkit.calibration import training
from quantkit.calibration.learned_rounding import Training, _Latent, refine
from quantkit.calibration.training import HeldOut, train
from quantkit.calibration.walk import walk
from quantkit.errors import RecipeError
from quantkit.methods.gptq import METHOD as GPTQ
from quantkit.methods.rtn import round_layer
from quantkit.models.skeleton import load

GROUP = 32


class Round(torch.autograd.Function):
    """Rounding whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def random_layer(symmetric):
    """Of a symmetric one every second row has negative scales."""
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    layer = round_layer(weight, 4, GROUP, symmetric)
    if symmetric:
        layer.codes[::2], layer.scales[::2] = (16 - layer.codes[::2].int()).clamp(max=15).byte(), -layer.scales[::2]
    return weight, layer


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_step_follows_the_signs_that_autograd_gives(symmetric):
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
    assert torch.allclose(latent.position, (position - 0.01 * position.grad.sign()).clamp(-0.49, 15.49).detach())
    assert torch.allclose(latent.stretch, -0.001 * stretch.grad.sign())


@pytest.fixture
def rounded_block(tiny_with):
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


def block_error(block, targets):
    with torch.no_grad():
        out = block.call(block.module, block.inputs, range(len(block.inputs))).float()
    return float(((out - targets.float()).square().mean(-1) / targets.float().square().mean(-1)).mean())


def test_the_block_comes_nearer_to_the_exact_one(rounded_block):
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


def test_a_solution_that_training_only_harms_is_given_back(rounded_block):
    block, layers, weights = rounded_block
    refined = refine(block, layers, weights, Training(10, code_rate=3.0, scale_rate=0.9), seed=0)
    for name, layer in layers.items():
        assert torch.equal(refined[name].codes, layer.codes)
        assert torch.equal(refined[name].scales, layer.scales)


def test_too_few_sequences_are_refused_before_work(tiny_llama):
    job = job_for(tiny_llama, "gptq", refine=True).job
    few = job.recipe.calibration.model_copy(update={"sequences": 15})
    job = job.changed(recipe=job.recipe.model_copy(update={"calibration": few}))
    with pytest.raises(RecipeError, match=r"holds out one calibration sequence in 8 and needs 16 or more; 15 were"):
        GPTQ.check(job)


class Student:
    """Writes down what it is asked for; `losses` are its held-out losses in order."""

    def __init__(self, losses):
        self.losses, self.now = losses, 0.0
        self.measured = []
        self.steps = []
        self.best = []  # how many steps were done whenever the state was kept
        self.reports = []

    def measure(self, sequences):
        if sequences[0] == 3:
            self.now = next(self.losses)
        self.measured.append(sequences)
        return self.now

    def step(self, number, sequences, first):
        assert (number, first) == (len(self.steps), 8.0)
        self.steps.append(sequences)


def trained(losses, steps, patience=None):
    student = Student(iter(losses))
    train(
        *(12, 2, steps, HeldOut(4, 3, patience), 7),
        measure=student.measure,
        step=student.step,
        keep=lambda: student.best.append(len(student.steps)),
        report=lambda first, best: student.reports.append((first, best)),
    )
    return student


def test_ranks_decide_by_all_held_out_sequences_and_measure_equally_often(monkeypatch):
    """The other rank has three batches of them; then 6 sequences with a loss of 5 each."""
    others = iter([torch.tensor([0.0, 3.0])] + [torch.tensor([30.0, 6.0])] * 2)
    monkeypatch.setattr(training, "size", lambda: 2)
    monkeypatch.setattr(training, "sum_over", lambda sums: sums.add_(next(others)))
    measured, told = [], []
    train(
        *(4, 2, 1, HeldOut(4, 1), 0),
        measure=lambda batch: measured.append(batch) or 1.0,
        step=lambda *_: None,
        keep=lambda: None,
        report=lambda first, _best: told.append(first),
    )
    assert measured == [[3]] * 6
    assert told == [pytest.approx(31 / 7)]


def test_batches_are_drawn_from_what_is_not_held_out_until_too_few_are_left():
    student = trained([8.0] * 9, 10)
    trained_on = [0, 1, 2, 4, 5, 6, 8, 9, 10]
    generator = torch.Generator().manual_seed(7)
    want = []
    for _ in range(3):
        order = [trained_on[i] for i in torch.randperm(9, generator=generator).tolist()]
        want += [order[start : start + 2] for start in range(0, 8, 2)]
    assert student.steps == want[:10]
    # Measured at first, after every third step, and at the end; the last part of the held-out ones is smaller.
    assert student.measured == [[3, 7], [11]] * 5


def test_the_state_with_the_least_held_out_loss_is_kept():
    student = trained([8.0, 5.0, 6.0, 4.0, 4.0], 12)
    assert student.best == [3, 9]
    assert student.reports == [(8.0, 8.0)] * 2 + [(8.0, 5.0)] * 6 + [(8.0, 4.0)] * 4


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ([8.0, 9.0, 9.0, 9.0, 9.0], 15),  # two in a row at step 6 already, but half of the steps only then
        ([8.0, 9.0, 9.0, 9.0, 7.0, 9.0], 18),
        ([8.0, *(7.0 - i for i in range(10))], 29),
    ],
)
def test_patience_ends_training_in_its_second_half(losses, steps):
    assert len(trained(losses + [9.0] * 9, 29, patience=2).steps) == steps


def test_a_solution_is_where_training_starts_even_off_the_nearest_code():
    weight, layer = random_layer(True)
    moved = replace(layer, codes=(layer.codes + 1).clamp(max=15))
    for start in (layer, moved):
        assert torch.equal(_Latent(start, weight, margin=0.1).value(), start.dense())
