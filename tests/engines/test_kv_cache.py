"""Types of the key-value cache: what they cost, against slow references, and what is refused."""

import json

import pytest
import torch
from engine_logits import IDS, far_apart, logits_by
from quantized_folders import foreign
from safetensors.torch import load_file
from tiny_models import CALIBRATION, EVALUATION
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from trials import dense_values

from quantkit import convert, evaluate, verify
from quantkit.calibration.tokens import draw_tokens
from quantkit.errors import ArtifactError, RecipeError
from quantkit.evaluation.engine_choice import choose
from quantkit.formats.source import open_model, open_source
from quantkit.records.recipe import CalibrationSpec, EngineSpec
from quantkit.report.table import Table

QUICK = {**EVALUATION, "probes": ("perplexity",)}
FP8, FP8_BY_REFERENCE = EngineSpec(kv_cache="fp8"), EngineSpec(kv_cache="fp8", engine="reference")
SCALED = {"format": "compressed-tensors", "kv_scales": True}
# As llm-compressor writes it for an FP8 cache, with version 0.20 of compressed-tensors.
SCHEME = """{"num_bits": 8, "type": "float", "symmetric": true, "group_size": null, "strategy": "tensor",
             "dynamic": false}"""


def changed_attention(folder, monkeypatch, change, values=None):
    """The model in transformers; `change(block, "k" or "v", states)` is called for what it would cache."""
    plain, model = (
        modeling_llama.apply_rotary_pos_emb,
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"),
    )
    model.load_state_dict(values or {}, strict=False)
    calls = []

    def rotated(query, key, *rest, **how):
        query, key = plain(query, key, *rest, **how)
        calls.append(key)
        return query, change((len(calls) - 1) % len(model.model.layers), "k", key)

    for number, layer in enumerate(model.model.layers):
        layer.self_attn.v_proj.register_forward_hook(lambda _m, _i, out, number=number: change(number, "v", out))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)
    return model.eval()


def stored_scales(folder):
    tensors = load_file(folder / "model.safetensors")
    return {(n, kind): tensors[f"model.layers.{n}.self_attn.{kind}_scale"] for n in range(3) for kind in "kv"}


@pytest.mark.parametrize("scaled", [False, True])
def test_fp8_is_what_rounding_behind_the_rotary_embedding_gives(scaled, tiny, artifact_of, monkeypatch):
    made = artifact_of("rtn", "8", **SCALED) if scaled else None
    folder, scales = (made.folder, stored_scales(made.folder)) if scaled else (tiny, {})

    def rounded(number, kind, states):
        scale = scales.get((number, kind), torch.ones(1)).float()
        return (states / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    plain, ours = (
        logits_by("reference", folder, [IDS], 128, dtype="float32", kv_cache=cache)[0] for cache in (None, "fp8")
    )
    model = changed_attention(tiny, monkeypatch, rounded, dense_values(made) if scaled else None)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([IDS])).logits[0]
    # A value on the edge of two codes may fall to either side.
    assert far_apart(ours, theirs) < far_apart(ours, plain) / 30


@pytest.mark.parametrize(
    ("method", "bits"), [("rtn", "4"), ("gptq", "nvfp4"), ("gptq", "4"), ("awq", "4"), ("int8", "8"), ("fp8", "8")]
)
def test_scales_are_the_largest_keys_and_values_of_the_calibration_text(method, bits, tiny, artifact_of, monkeypatch):
    artifact, source, largest = artifact_of(method, bits, **SCALED), open_source(str(tiny)), {}

    def seen(number, kind, states):
        largest[number, kind] = max(float(states.abs().max()), largest.get((number, kind), 0.0))
        return states

    model = changed_attention(tiny, monkeypatch, seen, dense_values(artifact))
    with torch.no_grad():
        model(input_ids=torch.from_numpy(draw_tokens(source.tokenizer(), CalibrationSpec(**CALIBRATION), 0).ids))
    scales = {place: scale.tolist() for place, scale in stored_scales(artifact.folder).items()}
    assert scales == {place: [pytest.approx(value / 448, rel=0.02)] for place, value in largest.items()}  # bfloat16
    config = json.loads((artifact.folder / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"] == json.loads(SCHEME)
    assert verify(artifact).manifest.options["kv_scales"]


@pytest.mark.usefixtures("new_cache")
def test_transformers_rounds_with_the_same_scales_and_a_report_says_so(artifact_of, tiny):
    pytest.importorskip("compressed_tensors")
    artifact = artifact_of("rtn", "8", **SCALED)
    ours = logits_by("reference", artifact.folder, [IDS], 128, dtype="float32", kv_cache="fp8")
    assert far_apart(ours, logits_by("transformers", artifact.folder, [IDS], 128, dtype="float32")) < 1e-5
    none, asked, other = (
        evaluate(artifact, **QUICK, source=str(tiny), engine=engine)
        for engine in (EngineSpec(), FP8, EngineSpec(engine="transformers"))
    )
    assert [report.engine.kv_cache for report in (none, asked, other)] == [None, "fp8", "fp8"]
    assert "asks for an FP8 key-value cache" in none.engine.notes[0]
    assert asked.engine.notes[0] == other.engine.notes[0] == "cached keys and values have the scales in its files"
    assert choose(open_model(str(tiny)), FP8_BY_REFERENCE).notes[0] == "cached keys and values have scales of 1"


def scheme(**changes):
    return lambda settings, _tensors: settings["kv_cache_scheme"].update(changes)


def scale(value):
    return lambda _settings, tensors: tensors.update({"model.layers.1.self_attn.v_scale": value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (scheme(type="int"), "does not compute the kv_cache_scheme .*'type': 'int'"),
        (scheme(strategy="attn_head"), "'attn_head'.* only FP8 per tensor"),
        (scheme(dynamic=True), "'dynamic': True"),
        (scheme(symmetric=False), "'symmetric': False"),
        (lambda settings, _: settings.update(kv_cache_scheme=8), "kv_cache_scheme 8"),
        (scale(torch.ones(2)), "not one float"),
        (scale(torch.tensor([float("nan")])), "v_scale is nan"),
        (scale(torch.zeros(1)), "v_scale is 0.0"),
        (lambda _, tensors: tensors.pop("model.layers.1.self_attn.v_scale"), "one of k_scale and v_scale of layer 1"),
    ],
)
def test_other_caches_are_refused_or_noted(change, says, artifact_of, tmp_path):
    model = open_model(str(foreign(artifact_of("rtn", "8", **SCALED), tmp_path / "out", change)))
    assert not [name for name in model.source.tensors if name.endswith("k_scale")]
    with pytest.raises(ArtifactError, match=says):
        choose(model, FP8)
    assert "no figure includes its key-value cache" in choose(model, EngineSpec(engine="reference")).notes[0]


@pytest.mark.parametrize("kind", ["gptq", "awq", "mlx"])
def test_formats_without_scales_refuse_to_calibrate_them(kind, tiny, tmp_path):
    with pytest.raises(RecipeError, match=f"{kind} holds no scales .* give --format compressed-tensors"):
        convert(str(tiny), "rtn", 4, tmp_path / "out", format=kind, kv_scales=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("new_cache")
def test_a_narrower_cache_costs_more_and_columns_may_differ_in_it_alone(artifact_of, tiny):
    made = artifact_of("gguf", "Q8_0")
    reports = [
        evaluate(made, **QUICK, source=str(tiny), engine=EngineSpec(kv_cache=cache))
        for cache in (None, "f16", "q8_0", "q4_0")
    ]
    none, half, eight, four = (report.find("kld").value for report in reports)
    assert none == half != eight
    assert four > 2 * max(half, eight)
    table = Table(tuple(reports[1:]))
    assert table.columns == [f"gguf-Q8_0, cache {cache}" for cache in ("f16", "q8_0", "q4_0")]
    assert reports[3].engine.kv_cache == "q4_0"
    assert len({report.fingerprint for report in reports}) == 4


def test_a_cache_that_the_engine_lacks_is_refused_at_once(artifact_of, tiny):
    for model, cache in ((artifact_of("gguf", "Q8_0").folder, "fp8"), (tiny, "q8_0")):
        with pytest.raises(RecipeError, match=f"has no key-value cache of type {cache}, only .* Leave --kv-cache out"):
            choose(open_model(str(model)), EngineSpec(kv_cache=cache))
