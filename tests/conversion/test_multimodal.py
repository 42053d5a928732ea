"""Multimodal checkpoints: the text half is quantized, the rest is kept, and the whole opens as what it was."""

import json
import shutil

import numpy as np
import pytest
import torch
from edits import edit_tensors
from engine_logits import logits_by, logits_of
from gguf_files import slow_but
from safetensors.torch import load_file, save_file
from tiny_adapters import ALPHA, RANK, low_rank, save_adapter
from tiny_architectures import whole_model
from tiny_models import CALIBRATION, EVALUATION, changed_copy
from tiny_multimodal import FURTHER, MULTIMODAL, PROCESSOR, save_multimodal
from transformers import AutoModelForImageTextToText

from quantkit import convert, evaluate, verify
from quantkit.checkpoints.spool import CheckpointWriter
from quantkit.contracts.registry import find_format
from quantkit.contracts.stored import open_stored
from quantkit.errors import ArtifactError, SourceError, UnsupportedError
from quantkit.formats.source import open_source
from quantkit.records.artifact import open_artifact

IDS = np.random.default_rng(0).integers(3, 300, (2, 24))
# Method, bits, options: what lands in each format that keeps the whole.
KINDS = {
    "gptq": ("rtn", "4", {}),
    "awq": ("rtn", "4", {"format": "awq", "sym": False}),
    "compressed-tensors": ("rtn", "4", {"format": "compressed-tensors"}),
    "fp8": ("fp8", None, {}),
    "nf4": ("nf4", None, {}),
    "float": ("float", "bfloat16", {}),
}
BESIDE = (
    *("vision_tower.", "model.vision_tower.", "model.embed_vision.", "multi_modal_projector.", "model.visual."),
    *("visual.", "model.vision_model.", "model.connector."),
)
QUICK = {
    ("gemma3", "gptq"), ("mistral3", "awq"), ("qwen3_5", "compressed-tensors"), ("gemma3", "fp8"), ("qwen3_5", "nf4"),
    ("mistral3", "float"), ("gemma4", "compressed-tensors"),
}  # fmt: skip
ALL = [(m, k) for m in MULTIMODAL for k in KINDS] + [(m, "compressed-tensors") for m in FURTHER]
PAIRS = [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow) for pair in ALL]


@pytest.fixture(scope="module")
def source_of(once):
    return lambda model: once(f"multimodal-{model}", lambda folder: save_multimodal(folder, model))


@pytest.fixture(scope="module")
def made(source_of, artifact_of):
    """The folder of an artifact of that model type and kind, made once."""

    def make(model, kind):
        method, bits, options = KINDS[kind]
        return artifact_of(method, bits, model=source_of(model), **options).folder

    return make


def beside(names):
    """Those of a checkpoint's tensors that are no part of its text half."""
    return {name for name in names if name.startswith(BESIDE)}


def logits(folder, engine, dtype="float32"):
    return logits_by(engine, folder, IDS, dtype=dtype).numpy()


def whole_logits(folder):
    """What transformers' multimodal class computes of text alone; nothing was made up or left over."""
    model, about = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert type(model).__name__.endswith("ForConditionalGeneration")
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    return logits_of(model, IDS).float().numpy()


@pytest.mark.parametrize("model", slow_but(["qwen2_vl"], MULTIMODAL | FURTHER))
def test_the_text_half_computes_what_the_whole_computes_of_text(model, source_of):
    want = whole_logits(source_of(model))
    for engine in ("reference", "transformers"):
        np.testing.assert_allclose(logits(source_of(model), engine), want, atol=1e-5)


@pytest.mark.parametrize(("model", "kind"), PAIRS)
def test_everything_beside_the_text_half_is_kept_and_transformers_opens_the_whole(model, kind, source_of, made):
    folder = made(model, kind)
    source, stored = (load_file(place / "model.safetensors") for place in (source_of(model), folder))
    kept = beside(source)
    assert len(kept) > 10
    assert beside(stored) == kept
    assert all(stored[name].dtype == source[name].dtype == torch.bfloat16 for name in kept)
    assert all(stored[name].equal(source[name]) for name in kept)
    stems = {name.rpartition(".")[0] for name in source}
    assert {name.partition(".weight.")[0].rpartition(".")[0] for name in stored if ".weight." not in name} == stems
    verify(folder)
    if kind in ("gptq", "awq"):
        return
    want = whole_logits(folder)
    # bitsandbytes computes in bfloat16.
    dtype, tolerance = ("bfloat16", 0.05 * float(np.abs(want).max())) if kind == "nf4" else ("float32", 1e-5)
    np.testing.assert_allclose(logits(folder, "transformers", dtype), want, atol=tolerance)
    if kind != "fp8":  # whose inputs our reader rounds, as vLLM does
        np.testing.assert_allclose(logits(folder, "reference", dtype), want, atol=tolerance)


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_what_readers_shall_leave_alone_is_named(kind, made):
    told = json.loads((made("gemma3", kind) / "config.json").read_text())
    assert told["vision_config"]
    assert told["text_config"]
    assert told["architectures"] == ["Gemma3ForConditionalGeneration"]
    settings, names = told["quantization_config"], ("multi_modal_projector", "vision_tower")
    if kind == "gptq":
        assert list(settings["dynamic"]) == [rf"-:(model\.)?{name}(\..*)?$" for name in names]
        assert json.loads((made("gemma3", kind) / "quantize_config.json").read_text()) == settings
    else:
        assert settings["modules_to_not_convert"] == [*(f"model.{name}" for name in names), *names]


def test_processor_files_and_the_manifest(source_of, made):
    folder = made("gemma3", "gptq")
    assert json.loads((folder / "preprocessor_config.json").read_text()) == PROCESSOR
    assert (folder / "processor_config.json").is_file()
    manifest, source = verify(folder).manifest, load_file(source_of("gemma3") / "model.safetensors")
    assert set(manifest.source.kept) == beside(source)
    assert manifest.source.architecture == manifest.source.config["model_type"] == "gemma3_text"
    assert "bfloat16" not in manifest.tensor_types
    assert manifest.source.parameters == sum(tensor.numel() for tensor in source.values())
    (note,) = [note for note in manifest.notes if "text half" in note]
    assert f"{len(manifest.source.kept)} tensors" in note
    assert "are stored unquantized" in note


def test_the_text_half_alone_becomes_a_gguf_file(source_of, tmp_path):
    manifest = convert(str(source_of("gemma3")), "gguf", "F32", out=tmp_path / "out").manifest
    assert not manifest.source.kept
    (note,) = [note for note in manifest.notes if "text half" in note]
    assert note.endswith("...")
    assert "are left out" in note
    np.testing.assert_allclose(
        logits(tmp_path / "out", "reference"), logits(source_of("gemma3"), "reference"), atol=1e-5
    )


def test_gptq_calibrates_on_the_text_half_and_its_judge_reads_it(source_of, tmp_path):
    source = str(source_of("mistral3"))
    folder = convert(source, "gptq", 4, out=tmp_path / "out", calibration=CALIBRATION).folder
    report = evaluate(folder, ("perplexity",), source=source, **EVALUATION)
    assert 0 < {m.name: m.value for m in report.measurements}["kld"] < 1


def test_an_artifact_is_a_source_again(made, tmp_path):
    first = made("mistral3", "compressed-tensors")
    folder = convert(str(first), "keep", 4, format="gptq", out=tmp_path / "out").folder
    np.testing.assert_array_equal(logits(folder, "reference"), logits(first, "reference"))
    one, other = (load_file(place / "model.safetensors") for place in (first, folder))
    assert beside(one) == beside(other)
    assert all(one[name].equal(other[name]) for name in beside(one))


def test_a_kept_tensor_that_changed_or_is_missing_is_refused(source_of, made, tmp_path, monkeypatch):
    folder = shutil.copytree(made("mistral3", "gptq"), tmp_path / "copy")
    name = min(beside(load_file(folder / "model.safetensors")))
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ArtifactError, match=f"lacks the tensor {name}"):
        open_stored(open_artifact(folder), find_format("gptq"))
    nan = changed_copy(source_of("mistral3"), tmp_path / "nan", lambda tensors: tensors[name].fill_(torch.nan))
    with pytest.raises(SourceError, match=rf"the tensor {name} in model\.safetensors has \d+ NaN"):
        convert(str(nan), "rtn", out=tmp_path / "out")
    finish = CheckpointWriter.finish

    def damage(made):
        finish(made)
        edit_tensors(made._folder, lambda tensors: tensors[name].add_(1))

    monkeypatch.setattr(CheckpointWriter, "finish", damage)
    with pytest.raises(ArtifactError, match=r"differs from"):
        convert(str(source_of("mistral3")), "rtn", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_quantized_beside_the_text_half_is_left_out(made, tmp_path):
    """Its bytes as they are would be codes in another layout's folder."""
    layer, tower = "language_model.model.layers.0.mlp.up_proj.", "vision_tower.more."
    folder = shutil.copytree(made("mistral3", "compressed-tensors"), tmp_path / "copy")
    (folder / "quantkit.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    more = {tower + name.removeprefix(layer): t.clone() for name, t in tensors.items() if name.startswith(layer)}
    edit_tensors(folder, lambda tensors: tensors.update(more))
    manifest = convert(str(folder), "keep", 4, format="gptq", out=tmp_path / "out").manifest
    assert [note for note in manifest.notes if note.endswith("are left out: vision_tower.more.weight")]
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if name.startswith(tower)]


def test_a_text_half_that_is_nowhere_is_refused(source_of, tmp_path):
    (tmp_path / "config.json").write_text((source_of("gemma3") / "config.json").read_text())
    tensors = {f"elsewhere.{n}.weight": torch.ones(4, 4) for n in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"no tensor has a prefix of its text half .* 'elsewhere\.0\.weight'"):
        open_source(str(tmp_path))


def test_a_flat_config_is_the_one_with_a_text_half(source_of, tmp_path):
    """As Qwen2-VL and Qwen2.5-VL are published."""
    folder = shutil.copytree(source_of("qwen2_vl"), tmp_path / "flat")
    config = json.loads((folder / "config.json").read_text())
    inner = config.pop("text_config")
    rope = {"type": "mrope", "mrope_section": inner["rope_parameters"]["mrope_section"]}
    unlike = ("model_type", "architectures", "rope_parameters", "dtype", "layer_types")
    flat = {key: value for key, value in inner.items() if key not in unlike}
    theta = inner["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config | flat | {"rope_scaling": rope, "rope_theta": theta}))
    source = open_source(str(folder))
    assert source.architecture == "qwen2"
    np.testing.assert_allclose(logits(folder, "reference"), whole_logits(source_of("qwen2_vl")), atol=1e-5)
    made = convert(str(folder), "rtn", format="compressed-tensors", out=tmp_path / "out").folder
    np.testing.assert_allclose(logits(made, "reference"), whole_logits(made), atol=1e-5)
    verify(made)


@pytest.mark.parametrize("called", ["model.language_model.", "language_model.model."])
def test_an_adapter_changes_the_text_half_and_the_rest_is_kept(called, source_of, tmp_path):
    layer, model = "layers.1.self_attn.q_proj", source_of("gemma3")
    stem = f"language_model.model.{layer}"
    noise = low_rank(model, [stem])
    a, b = (noise[f"{stem}.lora_{end}.weight"] for end in "AB")
    tensors = {name.replace("language_model.model.", called): value for name, value in noise.items()}
    adapter = save_adapter(tmp_path / "adapter", tensors, target_modules=["q_proj"])
    folder = convert(str(model), "float", "float32", adapters=[adapter], out=tmp_path / "out").folder
    source, stored = (load_file(place / "model.safetensors") for place in (model, folder))
    torch.testing.assert_close(stored[f"{stem}.weight"], source[f"{stem}.weight"].float() + ALPHA / RANK * b @ a)
    assert all(stored[name].equal(source[name]) for name in beside(source))
    assert "vision_config" in json.loads((folder / "config.json").read_text())


# Where published checkpoints have such layers, and transformers knows them to be.
LAYERS = {"deepseek_v3": "model.layers.61.", "qwen3_next": "mtp.layers.0."}


@pytest.fixture(scope="module")
def sources(architecture, tmp_path_factory):
    folders = {}
    for name, prefix in LAYERS.items():
        torch.manual_seed(0)
        more = {
            f"{prefix}self_attn.o_proj.weight": torch.randn(64, 64).to(torch.bfloat16),
            f"{prefix}mlp.gate.bias": torch.randn(5),
            f"{prefix}scalar": torch.tensor(2.5),
        }
        folder = tmp_path_factory.mktemp(name) / "model"
        folders[name] = changed_copy(architecture(name), folder, lambda tensors, more=more: tensors.update(more))
    return folders


@pytest.mark.parametrize(
    ("name", "method", "kind"),
    [("deepseek_v3", "rtn", "compressed-tensors"), ("qwen3_next", "fp8", None), ("qwen3_next", "float", None)],
)
def test_layers_beyond_the_model_are_kept(name, method, kind, sources, tmp_path):
    artifact = convert(str(sources[name]), method, out=tmp_path / "out", format=kind)
    source, stored = (load_file(folder / "model.safetensors") for folder in (sources[name], artifact.folder))
    kept = {tensor for tensor in source if tensor.startswith(LAYERS[name])}
    assert len(kept) == 3
    assert set(artifact.manifest.source.kept) == kept
    for tensor in kept:
        assert stored[tensor].dtype == source[tensor].dtype
        assert stored[tensor].equal(source[tensor])
    (note,) = [note for note in artifact.manifest.notes if "are stored unquantized" in note]
    assert note.startswith(f"3 tensors of the source ({64 * 64 + 5 + 1:,} values) are outside its architecture")
    verify(artifact.folder)
    if kind == "compressed-tensors":  # they are named where a reader would quantize them
        settings = json.loads((artifact.folder / "config.json").read_text())["quantization_config"]
        assert r"re:(model\.)?layers\.61(\..*)?$" in settings["ignore"]
        assert not any(name.endswith(r"layers\.0(\..*)?$") for name in settings["ignore"])


def test_an_artifact_that_keeps_them_computes_the_same_and_is_a_source_again(sources, tmp_path):
    source = sources["qwen3_next"]
    folder = convert(str(source), "float", "float32", out=tmp_path / "out").folder
    want = logits_of(whole_model(folder), IDS).numpy()
    np.testing.assert_allclose(logits(folder, "reference"), want, atol=1e-4)
    first = convert(str(source), "rtn", out=tmp_path / "first").folder
    again = convert(str(first), "keep", 4, format="compressed-tensors", out=tmp_path / "again")
    one, other = (load_file(folder / "model.safetensors") for folder in (source, again.folder))
    assert len(again.manifest.source.kept) == 3
    assert all(other[name].equal(one[name]) for name in again.manifest.source.kept)
