"""GPTQ against the paper's update in float64, one column at a time, and through whole conversions."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from tiny_llama import HIDDEN, LINEARS, SHAPES, calibration_ids, inputs_of, plain_model
from tiny_models import CALIBRATION, command_line, conversion_by
from trials import read_back

from quantkit.calibration.moments import LinearGroup
from quantkit.contracts.method import CheckedJob
from quantkit.contracts.run import Checked
from quantkit.conversion.check import prepare
from quantkit.formats._quantization_config import quantization_of
from quantkit.formats.source import open_source
from quantkit.methods import gptq
from quantkit.methods.gptq import Options, Solver, quantize_each
from quantkit.methods.rtn import round_layer
from quantkit.numerics import error_feedback
from quantkit.numerics.error_feedback import Feedback, feedback_factor
from quantkit.numerics.grid import fit_grid
from quantkit.numerics.quantized_weight import GroupedWeight
from quantkit.numerics.scale_refit import PartedHessian, Refit
from quantkit.numerics.second_moments import Gram
from quantkit.records.artifact import open_artifact
from quantkit.records.recipe import ConvertRecipe

# float32 and float64 may part where a value lies on the border of two codes; the error that such a code feeds forward
# stays within its row. (None of the cases here has such a row on the machine where they were written.)
ROWS, TIED_ROWS = 24, 1
# Sums of bfloat16 inputs in another order move a target by less than a code, except at the border of two.
LEAST_SAME = 0.999
BLOCKS = 2
NAMES = LINEARS[: 7 * BLOCKS]
ROUNDS = {
    "activation order": (2, 64, 192, Options(desc_act=True)),
    "moving groups, asymmetric": (4, 64, 192, Options(static_groups=False, sym=False)),
    "whole row": (4, -1, 200, Options()),
}


def layer_and_hessian(rows, columns, seed=0, samples=600):
    """A random weight, and H = E[x x^T] of strongly correlated inputs of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) * torch.linspace(3, 0.05, columns)[:, None]
    size = torch.rand(columns, generator=generator) * 2 + 0.1
    x = torch.randn(samples, columns, generator=generator) @ mixing * size / columns**0.5
    return torch.randn(rows, columns, generator=generator) * 0.05, x.T @ x / samples


def quantize_layer(weight, hessian, bits, group_size, options, cross=None, rows=None):
    # The moments are taken over and changed.
    own = None if cross is None else cross.clone()
    return Solver(LinearGroup([], hessian.clone(), own), bits, group_size, options, rows).quantize(weight)


def slow_gptq(weight, hessian, bits, group_size, options, given=None):
    """Equations 2 and 3 of the paper: round a column, spread its error, eliminate the column from H^-1.

    All in float64, unblocked, without Cholesky; columns keep their places and are only visited in another order.
    Scales and zeros are those of `given` where that comes.
    """
    rows, columns = weight.shape
    group = columns if group_size == -1 else group_size
    diagonal = torch.diagonal(hessian)
    h = hessian.double().clone()
    h[range(columns), range(columns)] *= 1 + options.shrinkage
    h[range(columns), range(columns)] += (1 + options.shrinkage) * options.damp_percent * diagonal.double().mean()
    inverse = torch.linalg.inv(h)
    by_importance = options.desc_act or (options.static_groups and group < columns)
    visits = sorted(range(columns), key=lambda k: -float(diagonal[k])) if by_importance else list(range(columns))
    members = visits if options.desc_act else list(range(columns))
    g_idx = torch.empty(columns, dtype=torch.int64)
    for place, column in enumerate(members):
        g_idx[column] = place // group
    groups = [members[start : start + group] for start in range(0, columns, group)]
    w = weight.double().clone()
    codes = torch.zeros(rows, columns, dtype=torch.uint8)
    scales = torch.zeros(rows, len(groups), dtype=torch.float16)
    zeros = torch.zeros(rows, len(groups), dtype=torch.uint8)

    # What a column's error costs: the paper's 1 / [H^-1]_qq once the columns before it are eliminated.
    costs, left = torch.zeros(columns), inverse.clone()
    for column in visits:
        costs[column] = 1 / left[column, column]
        left -= torch.outer(left[:, column], left[column]) / left[column, column]

    def fit(g):
        how = {"symmetric": options.sym, "search": options.scale_search, "least_zero": 1}
        grid = fit_grid(w[:, groups[g]].float(), len(groups[g]), bits, importance=costs[groups[g]], **how)
        scales[:, g], zeros[:, g] = grid.scales[:, 0], grid.zeros[:, 0]

    fixed = options.static_groups or group == columns or given is not None
    if given is not None:
        scales, zeros = given.scales, given.zeros
    elif fixed:
        for g in range(len(groups)):
            fit(g)
    for place, column in enumerate(visits):
        g = int(g_idx[column])
        if not fixed and place % group == 0:
            fit(g)
        scale, zero = scales[:, g].double(), zeros[:, g].double()
        code = torch.clamp(torch.round(w[:, column] / scale) + zero, 0, 2**bits - 1)
        error = (w[:, column] - (code - zero) * scale) / inverse[column, column]
        w -= error[:, None] * inverse[column]
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        codes[:, column] = code.to(torch.uint8)
    return GroupedWeight(codes, scales, zeros, g_idx, bits)


CASES = {
    "static groups over three blocks": (4, 64, 320, Options()),
    "groups of 32, more damping": (4, 32, 160, Options(damp_percent=0.1)),
    "activation order, asymmetric": (4, 64, 192, Options(desc_act=True, sym=False)),
    "whole row": (4, -1, 200, Options()),
    "whole row in activation order": (4, -1, 200, Options(desc_act=True)),
    "min and max": (4, 64, 192, Options(scale_search=False)),
    "3 bits": (3, 64, 192, Options()),
    "8 bits": (8, 64, 192, Options()),
    "2 bits, asymmetric": (2, 64, 192, Options(sym=False)),
    "moving groups of 96": (4, 96, 384, Options(static_groups=False)),
    "moving groups wider than a block": (4, 192, 384, Options(static_groups=False)),
    "moving groups in activation order": (4, 64, 192, Options(static_groups=False, desc_act=True)),
    "moving groups over two blocks, asymmetric, 3 bits": (3, 32, 160, Options(static_groups=False, sym=False)),
}


@pytest.mark.usefixtures("float32_products")
@pytest.mark.parametrize("case", CASES)
def test_gptq_equals_slow_reference(case):
    bits, group, columns, options = CASES[case]
    weight, hessian = layer_and_hessian(ROWS, columns)
    options = options.model_copy(update={"refit": False})  # numerics/test_scale_refit.py is its reference
    fast = quantize_layer(weight, hessian, bits, group, options)
    slow = slow_gptq(weight, hessian, bits, group, options)
    different = (fast.codes != slow.codes).any(1) | (fast.scales != slow.scales).any(1)
    assert int(different.sum()) <= TIED_ROWS
    assert torch.equal(fast.g_idx, slow.g_idx)
    assert fast.bits == bits
    if options.static_groups or group == -1:
        # Two scales of a group may serve it equally well but for the last digit.
        assert int((fast.scales != slow.scales).sum()) <= TIED_ROWS
        assert torch.equal(fast.zeros, slow.zeros)


@pytest.mark.usefixtures("float32_products")
@pytest.mark.parametrize("case", ROUNDS)
def test_a_further_round_takes_the_refitted_scales_and_keeps_the_better_rows(case):
    bits, group, columns, options = ROUNDS[case]
    weight, hessian = layer_and_hessian(ROWS, columns)
    once, twice = (
        quantize_layer(weight, hessian, bits, group, options.model_copy(update={"rounds": rounds})) for rounds in (1, 2)
    )
    held = Feedback(hessian.clone(), by_importance=False, shrinkage=options.shrinkage).hessian
    layer = slow_gptq(weight, hessian, bits, group, options, once)
    again = Refit(weight, PartedHessian(held, layer.group_order()))(layer)[0]
    errors = [
        torch.einsum("nk,kl,nl->n", change, held.double(), change)
        for change in ((weight - layer.dense()).double() for layer in (once, twice, again))
    ]
    assert bool((errors[1] <= errors[0] * (1 + 1e-6)).all())
    assert int((errors[1] < errors[0]).sum()) > ROWS / 4
    want = torch.minimum(errors[0], errors[2])
    assert int(((errors[1] - want).abs() > 1e-4 * want).sum()) <= 2 * TIED_ROWS
    kept = errors[2] > errors[0] * (1 + 1e-4)
    assert torch.equal(twice.codes[kept], once.codes[kept])
    assert torch.equal(twice.scales[kept], once.scales[kept])


def test_two_columns_and_factors_by_hand():
    # Whole row, symmetric, 2 bits: scale 2 * 0.75 / 3 = 0.5, codes -2..1 around zero 2.
    weight = torch.tensor([[0.75, 0.2]])
    hessian = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    options = Options(scale_search=False, refit=False, damp_percent=1e-9)
    got = quantize_layer(weight, hessian, 2, -1, options)
    # 0.75 is cut to 0.5; its error 0.25 moves the second weight by 0.25 * H[0, 1] / H[1, 1] = 0.125 to 0.325: code 1.
    # Rounded by itself 0.2 would become 0.
    assert got.scales.tolist() == [[0.5]]
    assert got.codes.tolist() == [[3, 3]]
    assert round_layer(weight, 2, -1, symmetric=True).codes.tolist() == [[3, 2]]
    # An input that never fires gets the mean 2, and damping is 1: sqrt of 5, 3, 3, 3
    upper = feedback_factor(torch.diag(torch.tensor([4.0, 0.0, 2.0, 2.0])), torch.arange(4), 0.5)
    assert torch.allclose(upper, torch.diag(torch.tensor([5.0, 3.0, 3.0, 3.0]).sqrt()))
    # Not positive definite, as sums in low precision can be: damping grows until the factor exists.
    upper = feedback_factor(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.arange(2), 0.2)
    assert torch.allclose(upper @ upper.T, torch.tensor([[3.0, 2.0], [2.0, 3.0]]))


@pytest.mark.parametrize(("rows", "paired"), [(None, False), (6, False), (6, True)])
def test_the_target_is_moved_by_the_shrunk_moments_of_its_own_inputs(rows, paired, units, monkeypatch):
    """Also where each weight is moved by itself, as few rows are."""
    monkeypatch.setattr(error_feedback, "SOLVED_COLUMNS", 24)  # of 64: two whole blocks and a part
    weight, hessian = layer_and_hessian(6, 64)
    _, other = layer_and_hessian(6, 64, seed=1)
    cross = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    moments = Feedback(hessian.clone(), cross.clone(), other.clone() if paired else None, shrinkage=0.3, rows=rows)
    assert (moments.correction is None) == (rows == 6 and not paired)
    used = (other if paired else hessian).double()
    diagonal = used.diagonal() * 1.3
    damped = used - torch.diag(used.diagonal()) + torch.diag(diagonal + 0.01 * diagonal.mean())
    want = weight.double() + weight.double() @ cross.double() @ torch.linalg.inv(damped)
    error = (moments.target(weight) - want).norm() / (want - weight).norm()
    assert error < (0.01 if units else 1e-5)


@pytest.mark.parametrize(("kind", "options"), [
    ("rank one", Options()), ("dead inputs", Options(static_groups=False, sym=False)), ("huge", Options(desc_act=True)),
    ("all dead", Options(desc_act=True)), ("fewer tokens than inputs", Options()),
])  # fmt: skip
def test_degenerate_inputs_give_finite_weights(kind, options):
    weight, hessian = layer_and_hessian(16, 128)
    x, dead = torch.linspace(-1, 1, 128), torch.arange(128) % 3 == 0
    hessian = {
        "rank one": torch.outer(x, x),
        "dead inputs": hessian * torch.outer(~dead, ~dead),
        "all dead": torch.zeros(128, 128),
        "fewer tokens than inputs": layer_and_hessian(16, 128, samples=10)[1],
        "huge": hessian * 1e12,
    }[kind]
    got = quantize_layer(weight, hessian, 4, 64, options)
    assert torch.isfinite(got.dense()).all()
    assert (got.dense() - weight).norm() < 0.6 * weight.norm()
    if kind == "all dead":
        assert torch.equal(got.codes, quantize_layer(weight, torch.eye(128), 4, 64, options).codes)


@pytest.fixture
def artifacts(two_blocks, artifact_of):
    return partial(artifact_of, model=two_blocks, group_size=64)


def unpacked(words):
    """(R, C) int32 words of eight nibbles -> (8 R, C), low nibbles first; written from the layout's description."""
    unsigned = words.long() & 0xFFFFFFFF
    return torch.stack([(unsigned >> (4 * i)) & 15 for i in range(8)], 1).reshape(-1, words.shape[1])


def dense_of(tensors, name):
    """Weight (N, K) float32 as a foreign reader would make it: (code - (stored zero + 1)) * scale."""
    stem = name.removesuffix("weight")
    codes = unpacked(tensors[stem + "qweight"])
    zeros = unpacked(tensors[stem + "qzeros"].T).T + 1
    group = tensors[stem + "g_idx"].long()
    return ((codes - zeros[group]) * tensors[stem + "scales"].float()[group]).T


def test_tensors_are_those_of_the_layout(artifacts):
    artifact = artifacts("gptq")
    tensors = load_file(artifact.folder / "model.safetensors")
    half, whole = torch.float16, torch.int32
    expected = {"model.embed_tokens.weight": (half, (304, HIDDEN)), "model.norm.weight": (half, (HIDDEN,))}
    for i in range(BLOCKS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            expected[f"model.layers.{i}.{norm}.weight"] = (half, (HIDDEN,))
        for layer, (n, k) in SHAPES.items():
            stem = f"model.layers.{i}.{layer}."
            expected[stem + "qweight"] = (whole, (k // 8, n))
            expected[stem + "qzeros"] = (whole, (k // 64, n // 8))
            expected[stem + "scales"] = (half, (k // 64, n))
            expected[stem + "g_idx"] = (whole, (k,))
            assert (tensors[stem + "qzeros"] == 0x77777777).all()
            assert torch.equal(tensors[stem + "g_idx"], torch.arange(k, dtype=torch.int32) // 64)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()} == expected
    assert artifact.manifest.tensor_types == {"int4": 14, "float16": 6}
    assert quantization_of(artifact.folder)["lm_head"] is False


@pytest.mark.parametrize(
    ("method", "options"), [("rtn", {"sym": False}), ("gptq", {}), ("gptq", {"desc_act": True, "sym": False})]
)
def test_an_independent_reader_gets_the_values_that_ours_gives(artifacts, two_blocks, method, options):
    artifact = artifacts(method, **options)
    tensors, source = load_file(artifact.folder / "model.safetensors"), open_source(str(two_blocks))
    ours = read_back(artifact)
    assert set(ours) == set(source.tensors)
    for name, value in ours.items():
        if name not in NAMES:
            assert torch.equal(value, source.tensor(name).half())
            continue
        assert torch.equal(dense_of(tensors, name), value.dense())
        weight = source.tensor(name).float()
        assert (value.dense() - weight).norm() < 0.35 * weight.norm()
        if method == "rtn":
            made = round_layer(weight, 4, 64, options.get("sym", True))
            assert torch.equal(value.codes, made.codes)
            assert torch.equal(value.zeros, made.zeros)


def quantized_by_hooks(folder, options):
    """All layers, each from the Hessian that plain hooks see in a whole transformers model quantized so far."""
    settings = {"group_size": 64, **options}
    asked = prepare(ConvertRecipe(model=str(folder), method="gptq", options=settings, calibration=CALIBRATION))
    job = CheckedJob.of(asked, Checked(None))
    model, exact, ids = plain_model(folder), plain_model(folder), calibration_ids(job)
    layers = {}
    stages = [list(SHAPES)[:3], list(SHAPES)[3:4], list(SHAPES)[4:6], list(SHAPES)[6:]]
    for i in range(BLOCKS):
        waiting = {}
        for number, stage in enumerate(stages):
            first = f"model.layers.{i}.{stage[0]}.weight"
            # Products on bfloat16 units, as in the walk; numerics/test_second_moments.py holds them against float64.
            gram = Gram(SHAPES[stage[0]][1], torch.device("cpu"), cross=True)
            gram.add(*(inputs_of(m, [first], ids)[first].bfloat16() for m in (model, exact)))
            cross = gram.cross() if job.options.gptaq and job.options.true_sequential else None
            hessian, rows = gram.mean(), sum(SHAPES[layer][0] for layer in stage)
            for layer in stage:
                name = f"model.layers.{i}.{layer}.weight"
                weight = job.source.tensor(name).float()
                layers[name] = quantize_layer(weight, hessian, 4, 64, job.options, cross, rows)
                waiting[name] = layers[name].dense()
            if job.options.true_sequential or number == 3:
                with torch.no_grad():
                    for name, value in waiting.items():
                        model.get_parameter(name).copy_(value)
    return layers


@pytest.mark.parametrize("options", [{}, {"true_sequential": False}, {"static_groups": False, "sym": False}])
def test_every_layer_is_calibrated_on_the_quantized_ones_before_it(artifacts, two_blocks, options):
    read = read_back(artifacts("gptq", **options))
    for name, expected in quantized_by_hooks(two_blocks, options).items():
        assert (read[name].codes == expected.codes).float().mean() > LEAST_SAME


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_the_number_of_threads_does_not_change_the_bytes_of_a_small_model(method, one_block, tmp_path):
    # Threads that wait actively, the default, make this fifty times slower on a busy machine.
    passive = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    tokens = ("--calibration-sequences", 16, "--calibration-length", 64)
    for threads in ("1", "2"):
        words = (*conversion_by(method, one_block, tmp_path / threads), *tokens)
        ended = command_line(*words, OMP_NUM_THREADS=threads, **passive)
        assert ended.returncode == 0, ended.stderr
    one, two = (open_artifact(tmp_path / threads).manifest.files for threads in ("1", "2"))
    assert one == two


@pytest.mark.parametrize("elements", [0, 10 * 96 + 30 * 96, 1 << 22])
def test_layers_quantized_as_one_are_those_quantized_alone(monkeypatch, elements):
    monkeypatch.setattr(gptq, "JOINED_ELEMENTS", elements)
    whole, hessian = layer_and_hessian(48, 96)
    weights = dict(zip("abc", whole.split([10, 30, 8]), strict=True))
    solver = Solver(LinearGroup([], hessian.clone()), 4, 32, Options())
    shapes = {name: value.numel() for name, value in weights.items()}
    layers = dict(quantize_each(solver.quantize, shapes, weights.__getitem__, hessian.device))
    for name, value in weights.items():
        alone = quantize_layer(value, hessian, 4, 32, Options())
        assert layers[name].shape == tuple(value.shape)
        assert (layers[name].codes == alone.codes).double().mean() > LEAST_SAME
        assert torch.allclose(layers[name].scales.float(), alone.scales.float(), rtol=2e-3)
