import pytest
import torch

from quantkit.engines import _torch_model as int4
from quantkit.engines._torch_model import EVALUATED_ROWS, GENERATED_ROWS, Int4Linear, generating, kernel_group
from quantkit.numerics.quantized_weight import GroupedWeight, contiguous_groups

N, K = 48, 256
# float32 sums; bfloat16 has 8 bits, in the scales of the kernel or in the dense weight, and in the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def weight_of(symmetric, group=64, shuffled=False, bits=4, rows=N, columns=K):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, columns // group, generator=generator) * 0.02 + 0.001).half()
    zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    if symmetric:
        scales *= torch.randint(0, 2, scales.shape, generator=generator).mul_(2).sub_(1)  # of either sign
    else:
        zeros = torch.randint(0, 1 << bits, zeros.shape, generator=generator, dtype=torch.uint8)
    g_idx = contiguous_groups(columns, group)
    if shuffled:
        g_idx = g_idx[torch.randperm(columns, generator=generator)]
    return GroupedWeight(codes, scales, zeros, g_idx, bits)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_layer_multiplies_by_the_dense_weight(symmetric, shuffled, dtype):
    weight = weight_of(symmetric, shuffled=shuffled)
    bias = torch.nn.Parameter(torch.linspace(-1, 1, N).to(dtype), requires_grad=False)
    layer = Int4Linear(weight, bias, dtype)
    for rows in ((1,), (8,), (9,), (40,), (2, 3)):
        x = torch.randn(*rows, K, generator=torch.Generator().manual_seed(1)).to(dtype)
        got, want = layer(x), x.double() @ weight.dense().double().T + bias.double()
        assert (got.dtype, got.shape) == (dtype, (*rows, N))
        assert (got.double() - want).abs().max() < TOLERANCE[dtype] * want.abs().max(), rows


@pytest.mark.parametrize("slab", [1, 5 * K])
def test_the_dense_weight_is_exact_up_to_its_dtype(slab, monkeypatch):
    monkeypatch.setattr(int4, "INT4_SLAB", slab)
    weight = weight_of(False)
    assert torch.allclose(Int4Linear(weight, None, torch.float32).dense(), weight.dense(), rtol=1e-5, atol=1e-8)
    half = Int4Linear(weight, None, torch.bfloat16).dense()
    assert torch.allclose(half.float(), weight.dense(), rtol=2**-8, atol=1e-7)


def test_short_prompts_run_on_the_kernel_only_where_the_model_generates():
    layer = Int4Linear(weight_of(False), None, torch.bfloat16)
    model = torch.nn.Sequential(layer)

    def on_the_kernel(x):
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, layer.packed, layer.group, layer.scale_zero)

    for rows, evaluated, generated in (
        (EVALUATED_ROWS, True, True),
        (EVALUATED_ROWS + 1, False, True),
        (GENERATED_ROWS, False, True),
        (GENERATED_ROWS + 1, False, False),
    ):
        x = torch.randn(rows, K, generator=torch.Generator().manual_seed(5)).bfloat16()
        kernel, dense = on_the_kernel(x), x @ layer.dense().T
        assert not torch.equal(kernel, dense)
        assert torch.equal(model(x), kernel if evaluated else dense)
        with generating(model):
            assert torch.equal(model(x), kernel if generated else dense)
        assert torch.equal(model(x), kernel if evaluated else dense)


@pytest.mark.parametrize(("bits", "rows", "group"), [(4, 48, 32), (4, 48, 256), (3, 6, 96), (2, 17, 320)])
def test_groups_bits_and_row_counts_that_run_on_the_kernel(bits, rows, group):
    weight = weight_of(False, group, bits=bits, rows=rows, columns=2 * group)
    assert kernel_group(weight)
    layer = Int4Linear(weight, None, torch.float32)
    for tokens in (1, 20):
        x = torch.randn(tokens, 2 * group, generator=torch.Generator().manual_seed(4))
        want = x.double() @ weight.dense().double().T
        assert layer(x).shape == (tokens, rows)
        assert (layer(x).double() - want).abs().max() < 1e-5 * want.abs().max()


def test_the_kernel_refuses_what_it_cannot_compute():
    weight = weight_of(True)
    assert kernel_group(weight)
    assert not kernel_group(GroupedWeight(weight.codes, weight.scales, weight.zeros, weight.g_idx, 8))
    assert not kernel_group(weight_of(True, group=16))
    uneven = weight.g_idx.clone()
    uneven[0] = 3
    assert not kernel_group(GroupedWeight(weight.codes, weight.scales, weight.zeros, uneven, 4))
