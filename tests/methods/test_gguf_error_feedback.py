"""Types of GGUF with error feedback, against the paper's update in float64, and in whole conversions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_logits import logits_by
from gguf_files import file_in, layer_and_hessian, slow_but, tensors_of
from tiny_models import CALIBRATION, changed_copy

from quantkit.calibration import learned_rounding, scale_tuning
from quantkit.conversion.convert import convert
from quantkit.errors import RecipeError
from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.codebooks import CODEBOOKS
from quantkit.formats.gguf.ggml.kquants import KQUANTS, read_codes, read_grid
from quantkit.methods.gguf import error_feedback as feedback
from quantkit.methods.gguf.error_feedback import quantize_layer
from quantkit.numerics.error_feedback import Feedback
from quantkit.system.files import sha256_of

SHRINKAGE, DAMP = 0.5, 0.01
QUICK = CODEBOOKS.keys() - {"IQ2_S", "IQ2_XS"}  # whose tables take ggml seconds


def slow_codes(weight, hessian, name, packed):
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
def test_codes_are_those_of_the_slow_reference(name):
    weight, hessian = layer_and_hessian(columns=512 if name == "Q4_K" else 256)
    grid = ggml.quantize(name, weight.numpy(), importance_of(hessian))
    packed = quantize_layer(name, weight, Feedback(hessian.clone(), shrinkage=SHRINKAGE, damp_percent=DAMP))
    ours = torch.from_numpy(read_codes(name, packed))
    # A value on the border of two codes may fall either way in float32; what follows it in the row then differs.
    same = (ours == slow_codes(weight, hessian, name, grid)).double().mean()
    assert same > 0.98


def importance_of(hessian):
    diagonal = hessian.diagonal()
    return (diagonal + 1e-6 * diagonal.mean() + 1e-30).numpy()


def nearest_points(kind, x, metric):
    """What one row's x (columns,) becomes: its own signs, of every point in turn the one of the least error."""
    minus = x < 0
    if kind.even and int(minus.sum()) % 2:
        cheapest = int((x.abs() * metric.diagonal()).argmin())
        minus[cheapest] = ~minus[cheapest]
    signs = torch.where(minus, -1.0, 1.0).double()
    table, made = torch.from_numpy(kind.table).double(), x.clone()
    parts = range(0, len(x), kind.size)
    for start in [*parts, *parts[:-1]]:
        part = slice(start, start + kind.size)
        tried = made.repeat(len(table), 1)
        tried[:, part] = signs[part] * table
        errors = x - tried
        made[part] = tried[((errors @ metric) * errors).sum(1).argmin(), part]
    return made


def slow_values(kind, weight, hessian, packed):
    """Round a group of columns, spread its error, eliminate the group from the inverse Hessian: one by one."""
    size = 8 if kind.even else kind.size
    scales = torch.from_numpy(kind.scales(packed)).double()
    h = hessian.double()
    mean = h.diagonal().mean()
    h = h + torch.diag(h.diagonal() * SHRINKAGE) + torch.eye(len(h)) * DAMP * mean
    h += torch.eye(len(h)) * DAMP / 3 * h.diagonal().mean()
    inverse, w, values = torch.linalg.inv(h), weight.double().clone(), torch.zeros(weight.shape, dtype=torch.float64)
    starts = range(0, len(h), size)
    for start in sorted(starts, key=lambda k: -float(hessian.diagonal()[k : k + size].sum())):
        group = slice(start, start + size)
        metric = torch.linalg.inv(inverse[group, group])
        for row in range(len(w)):
            scale = scales[row, start // kind.run]
            values[row, group] = scale * nearest_points(kind, w[row, group] / scale, metric)
        w -= (w[:, group] - values[:, group]) @ metric @ inverse[group]
        inverse -= inverse[:, group] @ metric @ inverse[group]
    return values


@pytest.mark.parametrize("name", slow_but(QUICK, sorted(CODEBOOKS)))
def test_points_are_those_of_the_slow_reference(name, monkeypatch):
    monkeypatch.setattr(feedback, "ROWS", 2)  # more than one part of the rows
    weight, hessian = layer_and_hessian(3, 512 if name == "IQ3_XXS" else 256)
    kind, grid = CODEBOOKS[name], ggml.quantize(name, weight.numpy(), importance_of(hessian))
    packed = quantize_layer(name, weight, Feedback(hessian.clone(), shrinkage=SHRINKAGE, damp_percent=DAMP))
    factors, values = kind.without_factors(packed, len(hessian))
    ours = torch.from_numpy(kind.without_factors(grid, len(hessian))[0].repeat(256, 1) * values)
    theirs = slow_values(kind, weight, hessian, grid)
    # A border of two points may be passed either way in float32; what follows it in the row then differs.
    assert torch.isclose(ours.double(), theirs, rtol=1e-4).double().mean() > 0.98
    assert not np.array_equal(factors, kind.without_factors(grid, len(hessian))[0])


def test_weights_of_zero_and_inputs_that_never_fire_give_finite_values():
    weight, hessian = layer_and_hessian()
    weight[0], weight[1, :256] = 0, 0
    hessian[:32], hessian[:, :32] = 0, 0
    for name in (*KQUANTS, "IQ2_XXS", "IQ3_XXS", "IQ3_S"):
        values = ggml.dequantize(name, quantize_layer(name, weight, Feedback(hessian.clone())), 512)
        assert np.isfinite(values).all()
        assert not values[0].any()
        assert np.abs(values[2:, :32]).max() > 0


def test_a_conversion_has_ggmls_types_and_its_own_codes(wide, artifact_of):
    artifacts = [artifact_of("gguf", "Q3_K_M", model=wide, rounding=kind) for kind in ("nearest", "gptq")]
    plain, ours = (file_in(artifact.folder) for artifact in artifacts)
    assert plain.stat().st_size == ours.stat().st_size
    record = {"damp_percent": DAMP, "shrinkage": SHRINKAGE, "gptaq_share": 0.25, "ample_tokens": 80}
    assert [artifact.manifest.options.get("error_feedback") for artifact in artifacts] == [None, record]
    theirs = tensors_of(plain)
    for name, value in tensors_of(ours).items():
        inside = name.startswith("model.layers.") and value.ndim == 2
        assert torch.equal(value, theirs[name]) != inside, name
        assert (value - theirs[name]).norm() < 0.5 * value.norm()
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is the reader of this test")
    tokens = np.arange(40)[None] % 200 + 5
    one, other = (logits_by(name, artifacts[1], tokens) for name in ("llamacpp", "reference"))
    assert float((one.log_softmax(-1) - other.log_softmax(-1)).abs().mean()) < 0.1


def test_an_interrupted_conversion_goes_on_to_the_same_bytes(wide, artifact_of, tmp_path, monkeypatch):
    def converted(bits="Q3_K_M"):
        return convert(str(wide), "gguf", bits, tmp_path / "again", calibration=CALIBRATION, rounding="gptq")

    with pytest.raises(RecipeError, match="rounding gptq has no effect on Q8_0"):
        converted("Q8_0")
    plain, seen = feedback._quantize_group, []

    def stop(*arguments):
        seen.append(arguments)
        if len(seen) == 7:
            raise KeyboardInterrupt
        plain(*arguments)

    monkeypatch.setattr(feedback, "_quantize_group", stop)
    with pytest.raises(KeyboardInterrupt):
        converted()
    again = converted()
    assert len(seen) == 7 + 4  # the first block was not done again
    quiet = artifact_of("gguf", "Q3_K_M", model=wide, rounding="gptq")
    assert sha256_of(file_in(quiet.folder)) == sha256_of(file_in(again.folder))


MANY = CALIBRATION | {"sequences": 16, "length": 128}


def test_channel_scales_undo_gains_between_layers(wide, tmp_path):
    """Columns of weights get gains, and the norms before them the inverse, which does not change the model."""

    def spread(tensors):
        generator = torch.Generator().manual_seed(0)
        for i in range(2):
            gain = torch.exp(torch.randn(256, generator=generator)).to(torch.bfloat16)
            layer = f"model.layers.{i}."
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                tensors[f"{layer}{name}.weight"] *= gain
            tensors[f"{layer}input_layernorm.weight"] /= gain

    folder = changed_copy(wide, tmp_path / "model", spread)
    tokens = np.arange(60)[None] % 200 + 5
    want = logits_by("reference", str(folder), tokens).log_softmax(-1)
    far = {}
    for awq in (False, True):
        made = convert(str(folder), "gguf", "Q2_K", tmp_path / str(awq), calibration=MANY, rounding="gptq", awq=awq)
        far[awq] = float((logits_by("reference", made, tokens).log_softmax(-1) - want).square().mean())
    assert far[True] < 0.8 * far[False], far


def test_trials_round_to_the_tensors_own_type():
    weight, hessian = layer_and_hessian()
    importance, order = hessian.diagonal().clone(), np.roll(np.arange(512), 7)
    for columns in (None, order):
        tensor = SimpleNamespace(type="Q3_K", shape=tuple(weight.shape), columns=columns)
        tried = feedback._tried(tensor, weight, importance)
        place = slice(None) if columns is None else torch.from_numpy(columns)
        rows, weights = weight[:, place].contiguous().numpy(), importance[place].contiguous().numpy()
        assert np.array_equal(
            tried[:, place].numpy(), ggml.dequantize("Q3_K", ggml.quantize("Q3_K", rows, weights), 512)
        )
    assert feedback._tried(tensor, weight * 1e9, importance).isnan().all()


REFINED = {"rounding": "gptq", "refine": True, "refine_steps": 16, "tune_steps": 4}


def test_refined_codes_and_factors_come_nearer_to_the_source(wide, tmp_path, monkeypatch):
    """Training starts from ggml's rounding here: on random weights, little is left to gain after error feedback."""
    seen = []
    plain = learned_rounding.train

    def train(student, *arguments):
        report = student.report
        student.report = lambda *losses: (seen.append((student, *losses)), report(*losses))
        plain(student, *arguments)

    monkeypatch.setattr(learned_rounding, "train", train)
    monkeypatch.setattr(scale_tuning, "train", train)
    monkeypatch.setattr(
        feedback, "quantize_layer", lambda kind, w, _: ggml.quantize(kind, w.numpy(), np.ones(w.shape[1], np.float32))
    )
    options = REFINED | {"tensor_type": {"attn_q": "IQ3_XXS", "attn_v": "IQ4_XS", "attn_output": "Q4_0"}}
    made = [
        convert(str(wide), "gguf", "Q2_K", tmp_path / name, calibration=MANY, **options | settings)
        for name, settings in (("refined", {}), ("start", {"refine": False}))
    ]
    losses = {student: (first, best) for student, first, best in seen}
    *blocks, (before, tuned) = losses.values()
    assert len(blocks) == 2
    assert all(best < 0.95 * first for first, best in blocks), blocks
    assert tuned < before
    assert [artifact.manifest.options["error_feedback"]["gptaq_share"] for artifact in made] == [1, 0.25]
    refined, start = (tensors_of(file_in(artifact.folder)) for artifact in made)
    for name, value in refined.items():
        trained = name.startswith("model.layers.") and value.ndim == 2 and "o_proj" not in name
        assert torch.equal(value, start[name]) != trained, name


def test_an_interrupted_tuning_goes_on_to_the_same_bytes(wide, tmp_path, monkeypatch):
    def converted(name):
        return convert(str(wide), "gguf", "Q2_K", tmp_path / name, calibration=MANY, awq=True, **REFINED)

    def stop(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(feedback, "tune", stop)
        with pytest.raises(KeyboardInterrupt):
            converted("again")
    files = [file_in(converted(name).folder) for name in ("again", "quiet")]
    assert sha256_of(files[0]) == sha256_of(files[1])


@pytest.mark.parametrize(
    ("options", "sequences", "said"),
    [
        ({"refine": True}, 16, "refine needs codes with error feedback. Add --rounding gptq"),
        ({"awq": True}, 16, "awq needs codes with error feedback. Add --rounding gptq"),
        ({"refine": True, "rounding": "gptq"}, 15, "needs 16 or more; only 15 were given"),
    ],
)
def test_refinement_that_cannot_start_is_refused(wide, tmp_path, options, sequences, said):
    few = MANY | {"sequences": sequences}
    with pytest.raises(RecipeError, match=said):
        convert(str(wide), "gguf", "Q2_K", tmp_path / "out", calibration=few, **options)


@pytest.mark.parametrize("name", ["Q4_0", "F16"])
def test_other_types_are_ggmls_own(name):
    weight, hessian = layer_and_hessian()
    moments = Feedback(hessian.clone())
    importance = moments.importance.numpy()
    ours = quantize_layer(name, weight, moments)
    weighted = ggml.quantize(name, weight.numpy(), np.ascontiguousarray(importance))
    assert (ours == weighted).mean() > 0.99
