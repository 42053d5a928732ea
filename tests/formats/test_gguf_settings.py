"""Settings of config.json that llama.cpp has none for, or has fixed otherwise, are refused by their names."""

import json
from copy import deepcopy

import pytest
import torch
from gguf_files import job_for
from safetensors.torch import save_file
from test_gguf_architectures import COHERE, DOTS, HALF, INDEX, INDEXED, KIMI, SPARSE, WINDOWED
from tiny_architectures import ARCHITECTURES, FULL, PLAIN, YARN, tiny_of
from tiny_architectures import SLIDING as SLIDE
from tiny_llama import VOCABULARY
from transformers import CONFIG_MAPPING

from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.hyperparameters import read_shape
from quantkit.formats.source import open_source

# By architecture: changed settings, and what the refusal says.
REFUSED = {
    "llama": [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu', but llama.cpp has 'silu'"),
        ({"rope_parameters": {**YARN, "beta_slow": 2}}, "beta_slow"),
        ({"rope_parameters": {**PLAIN, "rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": HALF}, "partial_rotary_factor"),
    ],
    "opt": [({}, r"'opt', which .*\(llama.cpp does not have it\). Known: llama, ")],
    "phimoe": [({}, "llama.cpp weighs its experts differently")],
    "smollm3": [({"no_rope_layers": [1, 0, 1]}, r"no_rope_layers = \[1, 0, 1\], but llama.cpp has \[1, 1, 1\]")],
    "olmoe": [({"num_key_value_heads": 2}, "num_key_value_heads = 2, but llama.cpp has 4")],
    # It would end our process, too.
    "granitemoehybrid": [({"layer_types": ["mamba"] * 3}, "aborts without attention or recurrence")],
    "nemotron_h": [({"layers_block_type": ["linear_attention", "moe", "mlp"]}, "some blocks have experts")],
    "deepseek_v3": [
        ({"q_lora_rank": None}, "q_lora_rank = None with 3 blocks"),
        ({"rope_parameters": YARN}, "mscale and mscale_all_dim"),
    ],
    "qwen3_5": [
        ({"linear_value_head_dim": 8}, "linear_value_head_dim = 8, but llama.cpp has 16"),
        ({"rope_parameters": PLAIN}, "mrope_section = "),
    ],
    "glm": [({"head_dim": 32}, "hidden_size = 64, but llama.cpp has 128")],
    "ernie4_5_moe": [({"moe_layer_end_index": 1}, "moe_layer_end_index = 1")],
    "minimax_m3_vl_text": [
        ({}, "layer_types = .*, but llama.cpp attends to selected tokens"),
        ({**SPARSE, "mlp_layer_types": ["sparse", "dense", "sparse"]}, "has dense blocks first"),
        ({**SPARSE, "index_n_heads": 1}, "index_n_heads = 1, but llama.cpp has 2"),
        ({**SPARSE, "shared_intermediate_size": 48}, "is not a multiple of an expert.s 32"),
    ],
    "mimo_v2_flash": [
        ({}, "which rotate nothing"),
        ({**WINDOWED, "attention_value_scale": 0.0}, "attention_value_scale = 0, but llama.cpp treats 0"),
        ({"rope_parameters": {FULL: HALF, SLIDE: PLAIN}}, "0.5.*, but llama.cpp has one"),
        ({**WINDOWED, "num_key_value_heads": 4}, "4 query heads, which twice the 4 key heads do not divide"),
    ],
    "laguna": [
        ({"num_attention_heads_per_layer": [8, 7, 8]}, r"\[8, 7, 8\] query heads and 2 key heads"),
        ({"rope_parameters": {FULL: PLAIN, SLIDE: {**HALF, "partial_rotary_factor": 0.07}}}, "an even number"),
    ],
    "hy_v3": [({"mlp_layer_types": ["dense"]}, r"mlp_layer_types = \['dense'\], and 3 blocks")],
    "minicpm3": [({"q_lora_rank": None}, "q_lora_rank = None, but llama.cpp needs a")],
    "granite_swa": [({"layer_rope_theta": [1e4, 5e5, 0]}, "layer_rope_theta = .*, but llama.cpp supports")],
    "mellum": [
        ({"layer_types": [SLIDE, FULL, SLIDE]}, "rope_theta = .*, but llama.cpp has one"),
        ({"mlp_layer_types": ["dense", "sparse", "sparse"]}, r"mlp_layer_types = .*, but llama\.cpp has \['sparse'"),
    ],
    "cohere2_moe": [
        ({"shared_expert_combination_strategy": "sum"}, "strategy = 'sum'"),
        ({**COHERE, "prefix_dense_sliding_window_pattern": 2}, "window_pattern = 2, but llama.cpp rotates"),
    ],
    "kimi_linear": [
        ({"q_lora_rank": None}, "linear_num_heads = 8, but llama.cpp has 4"),
        ({**KIMI, "num_key_value_heads": 2}, "num_key_value_heads = 2, but llama.cpp has 4"),
    ],
    "bailing_hybrid": [({"kda_lower_bound": 0.0}, "kda_lower_bound = 0.0, which is not below 0")],
    "deepseek_v32": [
        ({}, "index_head_dim = 16, but llama.cpp needs a power of two, 64 or more"),
        ({**INDEX, "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8}}, "llama.cpp has an mscale of 1"),
    ],
    "dots3_note_text": [
        ({**DOTS, "layer_types": [INDEXED] * 3}, "layer_types = .*, but llama.cpp needs windows in some"),
        ({**DOTS, "swa_q_lora_rank": 16}, "q_lora_rank = 32, with a window 16, but llama.cpp has one"),
    ],
    "gemma4": [
        ({"layer_types": [FULL, SLIDE, SLIDE, FULL]}, r"reuse the keys of block 0, but llama\.cpp those of block 1"),
    ],
    "gemma3n": [
        ({"num_kv_shared_layers": 2}, r"num_kv_shared_layers = 2, but llama\.cpp has 0"),
        ({"activation_sparsity_pattern": [0.5] * 4}, r"activation_sparsity_pattern = .*, but llama\.cpp has"),
        ({"intermediate_size": [128] * 3 + [256]}, r"intermediate_size = .* one for all blocks"),
    ],
    **{name: [({}, tiny.not_gguf)] for name, tiny in ARCHITECTURES.items() if tiny.not_gguf},
}  # fmt: skip


def config_alone(folder, name, **changes):
    """A checkpoint of a config.json and of tensors that are none of its: enough for what is refused before these."""
    tiny = tiny_of(name)
    settings = deepcopy({"vocab_size": VOCABULARY} | tiny.settings | tiny.for_gguf | changes)  # which may be changed
    config = CONFIG_MAPPING[tiny.kind](**settings).to_dict()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["CausalLM"]}))
    save_file({str(number): torch.zeros(1) for number in range(99)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_llama_cpp_has_otherwise_are_refused(tmp_path, name):
    for number, (changes, reason) in enumerate(REFUSED[name]):
        with pytest.raises(UnsupportedError, match=reason):
            job_for(config_alone(tmp_path / str(number), name, **changes), "F16", tmp_path / "out").check()


@pytest.mark.parametrize(
    ("experts", "groups", "used", "keys"),
    # In the second no expert is left out: llama.cpp ends the program for a choice of all.
    [(8, 4, 3, (4, 3)), (4, 2, 2, (1, 1)), (4, 4, 1, None), (9, 4, 1, None), (4, 2, 3, None), (4, 2, 0, None)],
)
def test_groups_of_experts_are_those_that_llama_cpp_can_choose_from(tmp_path, experts, groups, used, keys):
    numbers = {"n_routed_experts": experts, "n_group": groups, "topk_group": used}
    source = open_source(str(config_alone(tmp_path / "model", "deepseek_v32", **INDEX, **numbers)))
    if keys is None:
        said = f"{experts} experts in {groups} groups, of which each token uses {used}, but llama.cpp has equal groups"
        with pytest.raises(UnsupportedError, match=said):
            read_shape(source)
    else:
        found = read_shape(source).keys
        assert (found["expert_group_count"], found["expert_group_used_count"]) == keys
