"""K-quants with error feedback: against the paper's update in float64, and through whole conversions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_logits import engine_logits
from gguf_files import save_model, tensors_of
from tiny_models import CALIBRATION

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine
from quantkit.conversion.convert import convert
from quantkit.errors import RecipeError
from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.kquants import KQUANTS, read_codes, read_grid
from quantkit.formats.source import open_model
from quantkit.methods.gguf import error_feedback as feedback
from quantkit.methods.gguf.error_feedback import quantize_layer
from quantkit.numerics.error_feedback import Feedback
from quantkit.system.files import sha256_of

SHRINKAGE, DAMP = 0.5, 0.01


def layer_and_hessian(rows: int = 12, columns: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=generator) * torch.rand(columns, generator=generator)
    x = torch.randn(900, columns, generator=generator) @ mixing
    return torch.randn(rows, columns, generator=generator) * 0.05, x.T @ x / 900


def slow_codes(weight: torch.Tensor, hessian: torch.Tensor, name: str, packed: np.ndarray) -> torch.Tensor:
    """Round a column, spread its error, eliminate the column from the inverse Hessian: float64, one by one."""
    kind = KQUANTS[name]
    scales, minima = (torch.from_numpy(part).double() for part in read_grid(name, packed))
    h = hessian.double()
    mean = h.diagonal().mean()
    h = h + torch.diag(h.diagonal() * SHRINKAGE)
    h += torch.eye(len(h)) * DAMP * (1 + SHRINKAGE) * mean
    inverse, w = torch.linalg.inv(h), weight.double().clone()
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    for column in sorted(range(len(h)), key=lambda k: -float(hessian[k, k])):
        scale, minimum = scales[:, column // kind.group], minima[:, column // kind.group]
        if kind.steps:
            steps = torch.tensor(kind.steps, dtype=torch.float64)
            code = (w[:, column, None] - scale[:, None] * steps).abs().argmin(1)
            value = scale * steps[code]
        else:
            code = torch.clamp(torch.round((w[:, column] + minimum) / scale), 0, 2**kind.bits - 1)
            value = code * scale - minimum
        error = (w[:, column] - value) / inverse[column, column]
        w -= error[:, None] * inverse[column]
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        codes[:, column] = code.to(torch.uint8)
    return codes


@pytest.mark.parametrize("name", sorted(KQUANTS))
def test_codes_are_those_of_the_slow_reference(name: str) -> None:
    weight, hessian = layer_and_hessian()
    diagonal = hessian.diagonal()
    grid = ggml.quantize(name, weight.numpy(), (diagonal + 1e-6 * diagonal.mean() + 1e-30).numpy())
    packed = quantize_layer(name, weight, Feedback(hessian.clone(), shrinkage=SHRINKAGE, damp_percent=DAMP))
    ours = torch.from_numpy(read_codes(name, packed))
    # A value on the border of two codes may fall either way in float32; what follows it in the row then differs.
    same = (ours == slow_codes(weight, hessian, name, grid)).double().mean()
    assert same > 0.98


@pytest.mark.parametrize("name", sorted(KQUANTS))
def test_the_layers_outputs_are_nearer_than_ggmls(name: str) -> None:
    weight, hessian = layer_and_hessian(64)
    diagonal = hessian.diagonal()
    importance = (diagonal + 1e-6 * diagonal.mean() + 1e-30).numpy()

    def error(packed: np.ndarray) -> float:
        change = (torch.from_numpy(ggml.dequantize(name, packed, weight.shape[1])) - weight).double()
        return float(((change @ hessian.double()) * change).sum())

    theirs = ggml.quantize(name, weight.numpy(), importance)
    ours = quantize_layer(name, weight, Feedback(hessian.clone()))
    assert ours.shape == theirs.shape
    assert error(ours) < 0.8 * error(theirs)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0", "F16"])
def test_other_types_are_ggmls_own(name: str) -> None:
    weight, hessian = layer_and_hessian()
    moments = Feedback(hessian.clone())
    importance = moments.importance.numpy()
    ours = quantize_layer(name, weight, moments)
    weighted = ggml.quantize(name, weight.numpy(), np.ascontiguousarray(importance))
    assert (ours == weighted).mean() > 0.99


def test_weights_of_zero_and_inputs_that_never_fire_give_finite_values() -> None:
    weight, hessian = layer_and_hessian()
    weight[0], weight[1, :256] = 0, 0
    hessian[:32], hessian[:, :32] = 0, 0
    for name in KQUANTS:
        values = ggml.dequantize(name, quantize_layer(name, weight, Feedback(hessian.clone())), 512)
        assert np.isfinite(values).all()
        assert not values[0].any()
        assert np.abs(values[2:, :32]).max() > 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3)


def test_a_conversion_has_ggmls_types_and_its_own_codes(tiny: Path, tmp_path: Path) -> None:
    kinds = ("nearest", "gptq")
    for kind in kinds:
        convert(str(tiny), "gguf", "Q3_K_M", tmp_path / kind, calibration=CALIBRATION, rounding=kind)
    plain, ours = (next((tmp_path / kind).glob("*.gguf")) for kind in kinds)
    assert plain.stat().st_size == ours.stat().st_size
    theirs = tensors_of(plain)
    for name, value in tensors_of(ours).items():
        inside = name.startswith("model.layers.") and value.ndim == 2
        assert torch.equal(value, theirs[name]) != inside, name
        assert (value - theirs[name]).norm() < 0.5 * value.norm()


def test_llama_cpp_computes_what_the_file_says(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is the reader of this test")
    artifact = convert(str(tiny), "gguf", "Q4_K_M", tmp_path / "out", calibration=CALIBRATION, rounding="gptq")
    tokens = np.arange(40) % 200 + 5
    by_engine = [
        torch.from_numpy(engine_logits(find_engine(name).load(open_model(artifact), LoadSpec(1, 64)), tokens[None]))
        for name in ("llamacpp", "reference")
    ]
    ours, theirs = (logits.log_softmax(-1) for logits in by_engine)
    assert float((ours - theirs).abs().mean()) < 0.1


def test_an_interrupted_conversion_goes_on_to_the_same_bytes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(str(tiny), "gguf", "Q3_K_M", tmp_path / "quiet", calibration=CALIBRATION, rounding="gptq")
    plain, seen = feedback._quantize_group, []

    def stop(*arguments: object) -> None:
        seen.append(arguments)
        if len(seen) == 7:
            raise KeyboardInterrupt
        plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(feedback, "_quantize_group", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(str(tiny), "gguf", "Q3_K_M", tmp_path / "again", calibration=CALIBRATION, rounding="gptq")
    convert(str(tiny), "gguf", "Q3_K_M", tmp_path / "again", calibration=CALIBRATION, rounding="gptq")
    assert len(seen) == 7 + 2 * 4  # the first block was not done again
    quiet, again = (next((tmp_path / name).glob("*.gguf")) for name in ("quiet", "again"))
    assert sha256_of(quiet) == sha256_of(again)


def test_feedback_is_refused_where_it_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="rounding gptq changes nothing for Q8_0"):
        convert(str(tiny), "gguf", "Q8_0", tmp_path / "out", calibration=CALIBRATION, rounding="gptq")
