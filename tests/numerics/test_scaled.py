import pytest
import torch

from quantkit.numerics import scaled_rounding as fit
from quantkit.numerics.error_feedback import Feedback
from quantkit.numerics.quantized_weight import E2M1, InputRounding, ScaledWeight
from quantkit.numerics.scaled_rounding import FLOAT8, INT8, Float4, fit_scales, round_float8, round_int8

POINTS = torch.tensor([*E2M1, *(-value for value in E2M1[1:])])


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(tokens, columns, seed=1):
    """Inputs (tokens, columns) that depend on each other, with loud channels."""
    x = normal(tokens, columns, seed=seed) @ (torch.eye(columns) + 0.3 * normal(columns, columns, seed=seed + 1))
    x[:, ::7] *= 5
    return x


def test_a_float4_is_the_nearest_point_and_of_two_the_even_one_and_powers_of_two_switch_at_seven_quarters():
    largest = torch.tensor([1.0, 1.74, 1.75, 2.0, 3.49, 3.5, 0.0])
    assert fit.stored_power(largest / 6).tolist() == [0.25, 0.25, 0.5, 0.5, 0.5, 1.0, 1.0]
    x = normal(4000) * 3
    distance = (x.clamp(-6, 6)[:, None] - POINTS).abs()
    assert torch.equal((fit.nearest_float4(x) - x.clamp(-6, 6)).abs(), distance.min(1).values)
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    assert fit.nearest_float4(halves).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert fit.nearest_float4(-halves).tolist() == [0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, -6.0]


def test_the_values_of_a_weight_by_hand():
    scales = torch.tensor([[2.0, 3.0], [5.0, 7.0]], dtype=torch.bfloat16)
    ones = torch.ones(3, 3, dtype=torch.int8)
    assert ScaledWeight(ones, scales, (2, 2)).dense().tolist() == [[2, 2, 3], [2, 2, 3], [5, 5, 7]]
    codes = torch.tensor([[0, 1, 7, 9], [15, 8, 3, 4]], dtype=torch.uint8)
    exponents = torch.tensor([[126, 129], [127, 128]], dtype=torch.uint8)
    assert ScaledWeight(codes, exponents, (1, 2)).dense().tolist() == [[0, 0.25, 24, -2], [-6, 0, 3, 4]]
    scales = torch.tensor([[4.0, 448.0]]).to(torch.float8_e4m3fn)
    weight = ScaledWeight(codes[:1], scales, (1, 2), torch.tensor([8.0]))
    assert weight.dense().tolist() == [[0, 0.25, 336, -28]]


def test_a_weight_that_is_cut_has_the_same_values():
    weight = normal(300, 160)
    whole = ScaledWeight(weight.to(torch.float8_e4m3fn), torch.full((1, 1), 0.5), (300, 160))
    blocks, float4 = round_float8(weight, blocks=True), (Float4("nvfp4", 500.0), Float4("mxfp4"))
    for layer in (whole, blocks, round_int8(weight), *(kind.round(weight) for kind in float4)):
        for size in (1, 100, 128, 1000) if layer is blocks else (1, 100, 128, 1000, [7, 293]):
            assert torch.equal(torch.cat([part.dense() for part in layer.split(size)]), layer.dense())
    with pytest.raises(ValueError, match="row 7 is inside a block of 128 rows"):
        blocks.split([7, 293])


def test_searched_scales_are_never_worse_and_mostly_better():
    groups = normal(64, 96)
    for points, nearest, gain in ((INT8, fit.nearest_int8, 1.0), (FLOAT8, fit.nearest_float8, 0.95)):
        plain, searched = (fit_scales(groups, points, fit.stored_bfloat16, search=search) for search in (False, True))
        assert torch.equal(plain, (groups.abs().amax(-1) / points.top).bfloat16().float())
        errors = [
            (nearest(groups / scale[:, None]) * scale[:, None] - groups).square().sum(-1) for scale in (plain, searched)
        ]
        assert bool((errors[1] <= errors[0]).all())
        assert float(errors[1].sum()) <= gain * float(errors[0].sum())


def test_a_block_of_nvfp4_ends_at_six_or_at_four():
    """Four over six (arXiv:2512.02010): of the two ranges, the search takes the one with the smaller error."""
    ends = {4: [4.0, 3.0, 2.0, 1.0] * 4, 6: [6.0, 4.0, 3.0, 1.0] * 4}
    weight = torch.tensor([ends[4] + ends[6]]) / 8
    scales = Float4("nvfp4", 8.0).fit(weight, search=True)
    assert scales.tolist() == [[1 / 8, 1 / 8]]


def test_blocks_and_rows_have_scales_of_their_own():
    weight = normal(200, 300)
    rows, blocks = (round_float8(weight, blocks=blocks, search=False) for blocks in (False, True))
    assert torch.equal(rows.scales.float()[:, 0], (weight.abs().amax(1) / 448).bfloat16().float())
    for row in range(2):
        for column in range(3):
            part = weight[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
            assert blocks.scales[row, column] == (part.abs().max() / 448).bfloat16()
    assert all(float((layer.dense() - weight).norm() / weight.norm()) < 0.03 for layer in (rows, blocks))


def test_rows_of_zeros_and_of_tiny_values_stay_finite():
    weight = torch.stack([torch.zeros(128), torch.full((128,), 1e-38), torch.full((128,), 1e30)])
    for layer in (
        round_int8(weight), round_float8(weight, blocks=False), round_float8(weight, blocks=True),
        Float4("nvfp4", fit.divisor_of(1e30)).round(weight), Float4("nvfp4", fit.divisor_of(0)).round(weight[:1]),
        Float4("mxfp4").round(weight),
    ):  # fmt: skip
        values = layer.dense()
        assert bool(values.isfinite().all())
        assert bool((layer.factors() > 0).all())
        assert values[0].abs().max() == 0


def test_scales_of_float4_are_those_of_the_package():
    """Its observers' scales of groups, and its divisor of a tensor."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = normal(16, 128)
    weight[0, :32] = torch.linspace(-7, 7, 32)
    divisor = generate_gparam(weight.amin(), weight.amax())
    assert fit.divisor_of(float(weight.abs().max())) == pytest.approx(float(divisor), rel=1e-6)
    for grid, preset, given in (
        (Float4("nvfp4", float(divisor)), "NVFP4A16", divisor),
        (Float4("mxfp4", 1.0), "MXFP4A16", None),
    ):
        args = preset_name_to_scheme(preset, ["Linear"]).weights
        groups = weight.view(16, -1, grid.group)
        scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=given)
        assert torch.equal(grid.fit(weight, search=False), scales.float() / (1 if given is None else given)), preset


def slow_columns(target, hessian, order, round_one):
    """Algorithm 1 of the paper, one column at a time in float64, with the inverse of the Hessian."""
    work, result = target.double().clone(), torch.empty_like(target, dtype=torch.float64)
    for place, column in enumerate(order):
        left = order[place:]
        inverse = torch.linalg.inv(hessian.double()[left][:, left])
        result[:, column] = round_one(column, work[:, column]).double()
        error = (work[:, column] - result[:, column]) / inverse[0, 0]
        work[:, left] -= error[:, None] * inverse[0][None]
    return result


def moments_of(x):
    """The moments of inputs, and the Hessian that columns are rounded by: drawn to its diagonal, and damped."""
    hessian = x.T @ x / len(x)
    damped = hessian.clone()
    damped.diagonal().mul_(1.5)
    damped.diagonal().add_(0.01 * damped.diagonal().mean())
    return Feedback(hessian), damped


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_feedback_on_float4_equals_a_slow_reference(kind):
    weight, x = normal(24, 64), inputs(400, 64)
    moments, hessian = moments_of(x)
    grid = Float4(kind, fit.divisor_of(float(weight.abs().max())) if kind == "nvfp4" else 1.0)
    layer = fit.float4_with_feedback(weight, moments, grid)
    factors = layer.factors().double()

    def nearest(column, values):
        scale = factors[:, column // grid.group]
        distance = (values[:, None] / scale[:, None] - POINTS.double()).abs()
        return POINTS[distance.argmin(1)].double() * scale

    slow = slow_columns(weight, hessian, moments.order.tolist(), nearest)
    assert ((layer.dense().double() - slow).abs() < 1e-6).all()
    ours, theirs = (float((x @ (one.dense() - weight).T).square().sum()) for one in (layer, grid.round(weight)))
    assert ours < (0.6 if kind == "nvfp4" else 0.7) * theirs


def test_feedback_on_int8_equals_a_slow_reference():
    weight, x = normal(24, 64), inputs(400, 64)
    moments, hessian = moments_of(x)
    layer = fit.int8_with_feedback(weight, moments)
    first = fit_scales(weight, INT8, fit.stored_bfloat16, importance=moments.importance)

    def nearest(_column, values):
        return (values / first.double()).round().clamp(-127, 127) * first.double()

    slow = slow_columns(weight, hessian, moments.order.tolist(), nearest) / first.double()[:, None]
    assert ((layer.steps().double() - slow).abs() < 1e-3).all()
    errors = [float((x @ (one.dense() - weight).T).square().sum()) for one in (layer, round_int8(weight))]
    assert errors[0] < 0.6 * errors[1]
    assert layer.values.abs().max() <= 127


def test_inputs_are_rounded_as_vllm_does():
    x = torch.tensor([[1.0, -127.0, 0.49, 63.6], [0.0, 0.0, 0.0, 0.0], [254.0, 1.0, 3.0, -5.0]])
    assert InputRounding("int8").rounded(x).tolist() == [[1, -127, 0, 64], [0, 0, 0, 0], [254, 0, 4, -4]]
    x = torch.tensor([[448.0, 17.1, -30.9, 0.001], [896.0, 35.0, 0.0, 0.0]])
    # Of four bits, 17.1 lies between 16 and 18; the smallest number is 2^-9.
    assert InputRounding("float8").rounded(x).tolist() == [[448, 18, -30, 2**-9], [896, 36, 0, 0]]
    grouped = InputRounding("float8", 2).rounded(x)
    assert torch.equal(grouped, torch.cat([InputRounding("float8").rounded(part) for part in x.split(2, 1)], 1))


def test_errors_of_earlier_layers_are_made_good():
    """With the moment of what inputs lack, a layer aims at another weight."""
    weight, x = normal(24, 64), inputs(400, 64)
    hessian, cross = x.T @ x / len(x), (0.1 * normal(400, 64, seed=9)).T @ x / len(x)
    target = Feedback(hessian.clone(), cross.clone()).target(weight)
    assert not torch.allclose(target, weight, atol=1e-3)
    layer = fit.float4_with_feedback(weight, Feedback(hessian.clone(), cross.clone()), Float4("mxfp4"))
    assert torch.equal(
        layer.values, fit.float4_with_feedback(target, Feedback(hessian.clone()), Float4("mxfp4")).values
    )
    rows = fit.int8_with_feedback(weight, Feedback(hessian.clone(), cross.clone()))
    assert torch.equal(rows.values, fit.int8_with_feedback(target, Feedback(hessian.clone())).values)
