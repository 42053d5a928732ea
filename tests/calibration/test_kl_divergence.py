import pytest
import torch

from quantkit.calibration import scale_tuning as module
from quantkit.calibration.scale_tuning import divergence


@pytest.mark.parametrize(
    ("dtype", "tolerance", "slab"),
    [(torch.float32, 1e-5, 1 << 19), (torch.float32, 1e-5, 1), (torch.bfloat16, 2**-8, 100)],
)
def test_divergence_and_gradient_are_those_of_float64(monkeypatch, dtype, tolerance, slab):
    monkeypatch.setattr(module, "SLAB_ELEMENTS", slab)
    generator = torch.Generator().manual_seed(0)
    exact, change = torch.randn(2, 7, 31, generator=generator)
    exact, ours = (4 * exact).to(dtype), (4 * exact + change).to(dtype)
    x = ours.double().requires_grad_()
    reference = torch.nn.functional.kl_div(
        x.log_softmax(-1), exact.double().log_softmax(-1), log_target=True, reduction="sum"
    )
    slope, total = torch.autograd.grad(reference, x)[0], float(reference.detach())

    assert divergence(exact, ours) == pytest.approx(total, rel=1e-5)
    before = exact.clone()
    assert divergence(exact, ours, exact) == pytest.approx(total, rel=1e-5)
    assert (exact.double() - slope).norm() < tolerance * slope.norm()
    assert not torch.equal(exact, before)
