import itertools
from dataclasses import replace

import pytest
import torch
from tiny_llama import SEQUENCES, calibration_ids, job_for, plain_model

from quantkit.calibration import scale_tuning as module
from quantkit.calibration.activations import Activations
from quantkit.calibration.learned_codes import BETAS, Sharpening
from quantkit.calibration.learned_rounding import HeldOut, refine, train
from quantkit.calibration.scale_tuning import Tuning, tune
from quantkit.calibration.walk import walk
from quantkit.errors import RecipeError
from quantkit.methods.gptq import METHOD as GPTQ
from quantkit.methods.rtn import round_layer
from quantkit.models.skeleton import load
from quantkit.numerics.quantized_weight import GroupedWeight
from quantkit.system.ranks import Shards

GROUP, LENGTH = 32, 16


@pytest.fixture
def rounded_block(tiny_with):
    """A block of the tiny llama, plainly rounded to 3 bits, with its layers and their weights."""
    trial = job_for(tiny_with(num_hidden_layers=1), "gptq", length=16)
    blocks = walk(trial.job, trial.run, exact=1.0)
    block = next(blocks)
    weights = {name: load(trial.source, trial.job.skeleton, name).float() for name in block.linears}
    layers = {name: round_layer(weight, 3, 64, symmetric=True) for name, weight in weights.items()}
    for name, layer in layers.items():
        block.replace(name, layer.dense())
    yield block, layers, weights
    blocks.close()


def block_error(block, targets):
    with torch.no_grad():
        out = block.stream.call(range(len(block.inputs))).float()
    return float(((out - targets.float()).square().mean(-1) / targets.float().square().mean(-1)).mean())


def test_the_block_comes_nearer_to_the_exact_one(rounded_block):
    block, layers, weights = rounded_block
    targets = block.targets().read().clone()
    before = block_error(block, targets)
    refined = refine(block, layers, weights, 40, seed=0)
    assert block_error(block, targets) < 0.85 * before
    for name, layer in refined.items():
        assert torch.equal(block.linears[name].weight, layer.dense().bfloat16())
        assert int(layer.codes.max()) <= 7
        assert torch.equal(layer.zeros, layers[name].zeros)
    assert any(bool((refined[name].codes != layers[name].codes).any()) for name in layers)


def test_a_solution_that_training_only_harms_is_given_back(rounded_block):
    block, layers, weights = rounded_block
    refined = refine(block, layers, weights, 10, 0, Sharpening(scale_rate=0.9))
    for name, layer in layers.items():
        assert torch.equal(refined[name].codes, layer.codes)
        assert torch.equal(refined[name].scales, layer.scales)


def test_too_few_sequences_are_refused_before_work(tiny_llama):
    job = job_for(tiny_llama, "gptq", refine=True).job
    few = job.recipe.calibration.model_copy(update={"sequences": 15})
    job = replace(job, recipe=job.recipe.model_copy(update={"calibration": few}))
    with pytest.raises(
        RecipeError, match=r"holds out one calibration sequence in 8 and needs 16 or more; only 15 were"
    ):
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

    def keep(self):
        self.best.append(len(self.steps))

    def report(self, first, best):
        self.reports.append((first, best))


def trained(losses, steps):
    student = Student(iter(losses))
    train(student, 12, 2, steps, HeldOut(4, 3), 7, Shards())
    return student


def test_ranks_decide_by_all_held_out_sequences_and_measure_equally_often(monkeypatch):
    """The other rank has three batches of them; then 6 sequences with a loss of 5 each."""
    others = iter([torch.tensor([0.0, 3.0])] + [torch.tensor([30.0, 6.0])] * 2)
    monkeypatch.setattr(Shards, "sum", lambda _shards, sums: sums.add_(next(others)))
    student = Student(itertools.repeat(1.0))
    monkeypatch.setattr(student, "step", lambda *_: None)
    train(student, 4, 2, 1, HeldOut(4, 1), 0, Shards(0, 2))
    assert student.measured == [[3]] * 6
    assert [first for first, _ in student.reports] == [pytest.approx(31 / 7)]


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


def test_the_least_held_out_loss_is_kept():
    student = trained([8.0, 5.0, 6.0, 4.0, 4.0], 12)
    assert student.best == [3, 9]
    assert student.reports == [(8.0, 8.0)] * 2 + [(8.0, 5.0)] * 6 + [(8.0, 4.0)] * 4


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
    plain = module._Factors.step

    def step(scales, gradient, rate, count):
        seen[id(scales)] = gradient
        plain(scales, gradient, rate, count)

    monkeypatch.setattr(module._Factors, "step", step)
    monkeypatch.setattr(module, "BATCH_TOKENS", SEQUENCES * LENGTH)
    monkeypatch.setattr(module, "PASS_TOKENS", 4 * LENGTH)  # the last part of the batch is smaller
    students = []
    start = module._ScaleStudent.__init__
    monkeypatch.setattr(
        module._ScaleStudent, "__init__", lambda self, *given: (students.append(self), start(self, *given))[1]
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
        want = leaf.scales.grad
        got = seen[id(students[0].factors[name])]
        assert (got - want).norm() < 0.05 * want.norm(), name


@pytest.mark.parametrize(("bits", "pace"), [(2, 4), (3, 2), (4, 1)])
def test_adam_steps_are_those_of_torch(bits, pace):
    layer = round_layer(torch.randn(3, 32, generator=torch.Generator().manual_seed(1)), bits, 8, True)
    scales = module._Factors(layer)
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    adam = torch.optim.Adam([parameter], lr=0.01 * pace, betas=BETAS, eps=1e-12)
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 6):
        parameter.grad = torch.randn(3, 4, generator=generator)
        scales.step(parameter.grad / scales.factors, 0.01, count)
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
