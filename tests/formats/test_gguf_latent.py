"""GGUF files of models with latent attention beside delta attention or windows, or to tokens that an indexer chooses.

Each takes a CPU second or two, so they run only when they are asked for (`pytest -m slow`).
"""

from dataclasses import replace

import pytest
import test_gguf_architectures as plain
import yaml
from test_gguf_architectures import known_tokenizer, made, no_kept_scores  # noqa: F401
from tiny_architectures import ARCHITECTURES, Tiny, save_architecture
from tiny_llama import calibration
from tiny_more import as_published, settings_of
from transformers import CONFIG_MAPPING

from quantkit.conversion.convert import convert
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.architectures.known import KNOWN
from quantkit.formats.gguf.architectures.record import FIXED_EPSILON
from quantkit.formats.gguf.architectures.rows.latent import LATENT_NORMS
from quantkit.formats.gguf.contents import contents_of
from quantkit.formats.source import open_source
from quantkit.models.skeleton import open_skeleton

pytestmark = pytest.mark.slow
NEAR = {"rms_norm_eps": 1e-6}  # of all norms, as of those for which transformers has no other
KIMI = {**NEAR, "linear_num_heads": 4, "q_lora_rank": None}
# Fewer tokens than a text has; with few heads many tokens score 0, of which anybody takes any.
INDEX = {"index_head_dim": 64, "index_n_heads": 32, "index_topk": 16}
DOTS = {**INDEX, "swa_head_dim": 24}
INDEXED, SLIDE = "indexed_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in (INDEXED, SLIDE)}


def saved(folder, name, **how):
    return as_published(save_architecture(folder, name, **how), ARCHITECTURES[name].kind)


@pytest.fixture(autouse=True)
def published(monkeypatch):
    monkeypatch.setattr(plain, "save_architecture", saved)


def tiny(monkeypatch, kind, changes):
    """The name of such a tiny model."""
    name = f"{kind}, {changes}"
    found = Tiny(CONFIG_MAPPING[kind].__name__, 0, settings_of(kind))
    monkeypatch.setitem(ARCHITECTURES, name, replace(found, for_gguf=changes))
    return name


OTHER_SETTINGS = {"gemma3n_text", "lfm2_moe"}  # which need more than tiny settings to be built
KINDS = [
    ("kimi_linear", KIMI),
    ("kimi_linear", {
        **KIMI, "layer_types": ["full_attention", "linear_attention", "full_attention"], "n_group": 1,
        "mlp_layer_types": ["dense", "dense", "sparse"], "n_shared_experts": 2, "linear_conv_kernel_dim": 3,
    }),
    ("bailing_hybrid", {}),
    ("bailing_hybrid", {
        "layer_group_size": 3, "kda_lower_bound": -3.5, "head_dim": 16, "first_k_dense_replace": 2, "n_group": 1,
        "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    }),
    ("deepseek_v32", INDEX),
    ("deepseek_v32", {**INDEX, "n_group": 2, "topk_group": 2}),  # llama.cpp ends the program for this choice
    ("deepseek_v32", {
        **INDEX, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "index_head_dim": 128,
        "first_k_dense_replace": 2, "tie_word_embeddings": True, "n_group": 1,
    }),
    ("dots3_note_text", DOTS),
    ("dots3_note_text", {
        **DOTS, "layer_types": [SLIDE, INDEXED, SLIDE], "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
        "swa_kv_lora_rank": 24, "swa_qk_nope_head_dim": 24, "swa_head_dim": 32, "swa_v_head_dim": 24,
        "sliding_window": 20, "moe_intermediate_size": 24, "shared_experts_intermediate_size": 48, "n_group": 1,
        "rope_parameters": {INDEXED: PLAIN[INDEXED], SLIDE: {**PLAIN[SLIDE], "rope_theta": 5e5}},
    }),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_a_file_in_llama_cpp_and_back(tmp_path, monkeypatch, kind, changes, made):  # noqa: F811
    name = tiny(monkeypatch, kind, changes)
    plain.test_llama_cpp_computes_what_transformers_computes(name, made)
    plain.test_file_reads_back_as_the_source(name, made)
    plain.test_file_imports_as_a_checkpoint_that_computes_the_same(tmp_path, name, made)


@pytest.mark.parametrize(("kind", "changes"), [("kimi_linear", KIMI), ("bailing_hybrid", {})])
def test_another_epsilon_is_told(tmp_path, monkeypatch, kind, changes):
    """llama.cpp has one for all norms."""
    name = tiny(monkeypatch, kind, {**changes, "rms_norm_eps": 1e-5})
    folder = saved(tmp_path / "model", name, changes=ARCHITECTURES[name].for_gguf)
    notes = plain.job_for(folder, "F16", tmp_path / "out").check().checked.notes
    told = "epsilon 1e-05 for the norms of latent values and the lengths of queries and keys of delta attention"
    assert any(told in note for note in notes)
    name = tiny(monkeypatch, kind, {**changes, **NEAR})
    folder = saved(tmp_path / "near", name, changes=ARCHITECTURES[name].for_gguf)
    notes = plain.job_for(folder, "F16", tmp_path / "out").check().checked.notes
    assert not any("epsilon" in note for note in notes)


@pytest.mark.parametrize("kind", sorted(KNOWN.keys() - OTHER_SETTINGS))
def test_norms_that_have_another_epsilon_than_a_file_are_those_that_are_told(kind):
    config = CONFIG_MAPPING[kind](**settings_of(kind))
    for name in {"rms_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon"} & vars(config).keys():
        setattr(config, name, 3e-5)
    model = open_skeleton(config.to_dict() | {"architectures": ["CausalLM"]}).model
    norms = (part for part in model.modules() if "RMSNorm" in type(part).__name__)
    epsilons = {getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms}
    assert epsilons <= {3e-5, FIXED_EPSILON, None}
    assert (FIXED_EPSILON in epsilons) == (LATENT_NORMS in KNOWN[kind].fixed_epsilon)


def test_an_epsilon_that_all_norms_have_is_not_told(tmp_path, monkeypatch):
    name = tiny(monkeypatch, "dots3_note_text", {**DOTS, "rms_norm_eps": 1e-5})
    folder = saved(tmp_path / "model", name, changes=ARCHITECTURES[name].for_gguf)
    notes = plain.job_for(folder, "F16", tmp_path / "out").check().checked.notes
    assert not any("epsilon" in note for note in notes)


@pytest.mark.parametrize(("used", "keys"), [(1, (2, 1)), (2, (1, 1))])
def test_groups_that_leave_no_expert_out_are_one(tmp_path, monkeypatch, used, keys):
    """llama.cpp ends the program for a choice of all."""
    changes = {**INDEX, "n_group": 2, "topk_group": used}
    folder = saved(tmp_path / "model", tiny(monkeypatch, "deepseek_v32", changes), changes=changes)
    found = plain.job_for(folder, "F16", tmp_path / "out").check().checked.plan.plan.shape.keys
    assert (found["expert_group_count"], found["expert_group_used_count"]) == keys


REFUSED = [
    ("kimi_linear", {}, "q_lora_rank = 32; llama.cpp computes None"),
    ("kimi_linear", {"q_lora_rank": None}, "linear_num_heads = 8, and llama.cpp has 4 heads"),
    ("kimi_linear", {**KIMI, "num_key_value_heads": 2}, "num_key_value_heads = 2, and llama.cpp has one for each"),
    ("kimi_linear", {**KIMI, "moe_renormalize": False}, "norm_topk_prob = False"),
    ("kimi_linear", {**KIMI, "layer_types": ["linear_attention"] * 3}, "blocks of linear_attention alone"),
    ("kimi_linear", {**KIMI, "mlp_layer_types": ["sparse", "dense", "sparse"]}, "has dense blocks first"),
    ("bailing_hybrid", {"kda_safe_gate": False}, "kda_safe_gate = False"),
    ("bailing_hybrid", {"kda_lower_bound": 0.0}, "kda_lower_bound = 0.0, which is not below 0"),
    ("bailing_hybrid", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
    ("deepseek_v32", {**INDEX, "n_group": 4}, "4 experts in 4 groups, of which each token uses 1, and llama.cpp has"),
    ("deepseek_v32", {}, "index_head_dim = 16, and llama.cpp has a power of two, 64 or more"),
    ("deepseek_v32", {**INDEX, "index_head_dim": 96}, "index_head_dim = 96, and llama.cpp has a power of two"),
    ("deepseek_v32", {**INDEX, "mlp_layer_types": ["sparse", "dense", "sparse"]}, "has dense blocks first"),
    (
        "deepseek_v32",
        {**INDEX, "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8}},
        "the rope's mscale = 0.8, and llama.cpp has 1",
    ),
    ("dots3_note_text", {**DOTS, "layer_types": [INDEXED] * 3}, "layer_types = .*, and llama.cpp has windows in some"),
    ("dots3_note_text", {**DOTS, "swa_q_lora_rank": 16}, "q_lora_rank = 32, with a window 16, and llama.cpp has one"),
    ("dots3_note_text", {**DOTS, "swa_head_dim": 32}, "qk_rope_head_dim = 8, with a window 16, and llama.cpp has one"),
    ("dots3_note_text", {**DOTS, "shared_experts_intermediate_size": 40}, "has a multiple of the 32 of an expert"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), REFUSED)
def test_what_llama_cpp_has_otherwise_is_refused(tmp_path, monkeypatch, kind, changes, reason):
    folder = saved(tmp_path / "model", tiny(monkeypatch, kind, changes), changes=changes)
    with pytest.raises(UnsupportedError, match=reason):
        plain.job_for(folder, "F16", tmp_path / "out").check()


WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "kv_lora_rank": 256}
SHARED = {"shared_experts_intermediate_size": 256}
IDENTICAL = [
    ("kimi_linear", "Q4_K_M", {**KIMI, **WIDE, "linear_head_dim": 64}),
    ("kimi_linear", "Q2_K", {**KIMI, **WIDE, "linear_head_dim": 64, "num_experts": 8}),
    ("bailing_hybrid", "Q4_K_M", {**WIDE, "head_dim": 32}),
    ("bailing_hybrid", "Q2_K", {**WIDE, "head_dim": 32}),
    ("deepseek_v32", "Q4_K_M", {**INDEX, **WIDE, "q_lora_rank": 256}),
    ("deepseek_v32", "Q3_K_M", {**INDEX, **WIDE, "q_lora_rank": 256, "n_routed_experts": 8}),
    ("dots3_note_text", "Q4_K_M", {**DOTS, **WIDE, **SHARED, "q_lora_rank": 256, "swa_q_lora_rank": 256}),
    ("dots3_note_text", "Q2_K", {
        **DOTS, **WIDE, **SHARED, "layer_types": [SLIDE, INDEXED, SLIDE], "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "bits", "changes"), IDENTICAL)
@pytest.mark.parametrize("weighted", [False, True])
def test_bytes_equal_llama_cpp_s(tmp_path, monkeypatch, kind, bits, changes, weighted):
    plain.test_bytes_equal_llama_cpp(tmp_path, tiny(monkeypatch, kind, {}), bits, changes, weighted)


ONE_EACH = [("kimi_linear", KIMI), ("bailing_hybrid", {}), ("deepseek_v32", INDEX), ("dots3_note_text", DOTS | SHARED)]


@pytest.mark.parametrize(("kind", "changes"), ONE_EACH)
def test_types_are_chosen_of_what_calibration_runs(tmp_path, monkeypatch, kind, changes):
    """Matrices of single heads, and of an indexer, keep the type that they have without a choice."""
    folder = saved(
        tmp_path / "model",
        tiny(monkeypatch, kind, {}),
        changes={**changes, **WIDE, **({"q_lora_rank": 256} if kind == "deepseek_v32" else {}), "v_head_dim": 64},
    )
    out = convert(str(folder), "gguf", "auto", tmp_path / "out", calibration=calibration(), target_bpw=6.5)
    chosen = yaml.safe_load((out.folder / "recipe.yaml").read_text())["options"]["tensor_type"]
    assert len(set(chosen.values())) > 2
    kinds = {tensor.name: tensor.type for tensor in contents_of(out.folder).tensors}
    values = [name for name in kinds if name.endswith("attn_v_b.weight")]
    assert values
    alone = [name for name in kinds if ".indexer." in name and not name.endswith(("norm.weight", "bias"))]
    assert bool(alone) == ("index_n_heads" in changes)
    assert {kinds[name] for name in (*values, *alone)} <= {"Q6_K", "Q8_0"}  # the second where a row is too short
    assert not {*values, *alone} & chosen.keys()


@pytest.mark.parametrize(("kind", "changes"), ONE_EACH)
@pytest.mark.parametrize("options", [{"imatrix": True}, {"rounding": "gptq"}], ids=["imatrix", "feedback"])
def test_weighted_files_hold_nearly_the_source(tmp_path, monkeypatch, kind, changes, options):
    folder = saved(tmp_path / "model", tiny(monkeypatch, kind, {}), changes={**changes, **WIDE})
    out = convert(str(folder), "gguf", "Q4_K_M", tmp_path / "out", calibration=calibration(), **options)
    read, source = plain.tensors_of(next(out.folder.glob("*.gguf"))), open_source(str(folder))
    for tensor, info in source.tensors.items():
        if len(info.shape) == 2:
            expected = source.tensor(tensor).float()
            assert float((read[tensor] - expected).norm()) < 0.4 * float(expected.norm()), tensor
