"""What AWQ may scale in each architecture: found and proven by running blocks, held against what is known by hand."""

import re
from typing import Any

import pytest
import torch
import transformers
from tiny_architectures import ARCHITECTURES, VOCABULARY, save_architecture
from tiny_llama import converted, job_for
from torch import nn

from quantkit.errors import UnsupportedError
from quantkit.models import awq_folds, stand_in
from quantkit.models.awq_folds import provable_scalings
from quantkit.models.awq_mappings import FUSED, Scaling, fits, rows_before
from quantkit.models.skeleton import open_skeleton

QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
GATE_UP = "mlp.gate_proj mlp.up_proj"
VALUES, UP = "self_attn.v_proj > self_attn.o_proj", "mlp.up_proj > mlp.down_proj"
LLAMA = (f"input_layernorm > {QKV}", VALUES, f"post_attention_layernorm > {GATE_UP}", UP)
GEMMA2 = (f"input_layernorm+1 > {QKV}", VALUES, f"pre_feedforward_layernorm+1 > {GATE_UP}", UP)
GEMMA4 = (f"input_layernorm > {QKV}", f"pre_feedforward_layernorm > {GATE_UP}", UP)
SIDE_BY_SIDE = (f"input_layernorm > {QKV} {GATE_UP}", VALUES, UP)
BEHIND = (VALUES, UP)  # norms behind the layers feed the residual stream, too
PHI3 = (
    "input_layernorm > self_attn.qkv_proj",
    "self_attn.qkv_proj qkv > self_attn.o_proj",
    "post_attention_layernorm > mlp.gate_up_proj",
    "mlp.gate_up_proj gate_up > mlp.down_proj",
)
GLM = (LLAMA[0], VALUES, *PHI3[2:])
NEOX = (
    "input_layernorm > attention.query_key_value",
    "attention.query_key_value qkv_by_group > attention.dense",
    "post_attention_layernorm > mlp.dense_h_to_4h",
)
BLOOM = tuple(one.replace("attention.", "self_attention.") for one in NEOX)
EXPERTS_UP = "mlp.experts.*.up_proj > mlp.experts.*.down_proj"
EXPERTS = (
    *LLAMA[:2],
    "post_attention_layernorm > mlp.experts.*.gate_proj mlp.experts.*.up_proj & mlp.gate",
    EXPERTS_UP,
)
SHARED = (
    *LLAMA[:2],
    "post_attention_layernorm > mlp.experts.*.gate_proj mlp.experts.*.up_proj mlp.shared_expert.gate_proj "
    "mlp.shared_expert.up_proj & mlp.gate mlp.shared_expert_gate",
    "mlp.shared_expert.up_proj > mlp.shared_expert.down_proj",
    EXPERTS_UP,
)
MIXTRAL = tuple(
    re.sub(r"\bmlp\.", "block_sparse_moe.", one)
    .replace("gate_proj", "w1")
    .replace("up_proj", "w3")
    .replace("down_proj", "w2")
    for one in EXPERTS
)
LATENT = (
    "input_layernorm > self_attn.q_a_proj self_attn.kv_a_proj_with_mqa",
    "self_attn.q_a_layernorm > self_attn.q_b_proj",
    "self_attn.kv_a_layernorm > self_attn.kv_b_proj",
    "self_attn.kv_b_proj kv_by_head > self_attn.o_proj",
    *LLAMA[2:],
)
CONVOLUTION = (
    "operator_norm > conv.in_proj",
    "conv.in_proj qkv > conv.out_proj",
    "ffn_norm > feed_forward.w1 feed_forward.w3",
    "feed_forward.w3 > feed_forward.w2",
)
DELTA = "input_layernorm+1 > linear_attn.in_proj_qkv linear_attn.in_proj_z linear_attn.in_proj_b linear_attn.in_proj_a"
# By name in ARCHITECTURES: the scalings of the first block. Between a layer and its GELU's or SiLU's successor nothing
# can be scaled; ReLU lets scales through. Norms may multiply by weight + 1.
KNOWN: dict[str, tuple[str, ...]] = {
    "llama": LLAMA,
    "llama, tied": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA2,
    "phi": (f"input_layernorm > {QKV} mlp.fc1", "self_attn.v_proj > self_attn.dense"),
    "phi3": PHI3,
    "phi3, long": PHI3,
    "starcoder2": (*LLAMA[:2], "post_attention_layernorm > mlp.c_fc"),
    "olmo2": BEHIND,
    "gpt2": ("ln_1 > attn.c_attn", "attn.c_attn qkv > attn.c_proj", "ln_2 > mlp.c_fc"),
    "gpt_neox": NEOX,
    "gpt_neox, one after the other": NEOX,
    "gpt_neox, tied": NEOX,
    "falcon, one key-value head": (
        "input_layernorm > self_attention.query_key_value mlp.dense_h_to_4h",
        "self_attention.query_key_value qkv > self_attention.dense",
    ),
    "falcon, grouped": (
        "ln_attn > self_attention.query_key_value",
        "ln_mlp > mlp.dense_h_to_4h",
        "self_attention.query_key_value qkv_by_group > self_attention.dense",
    ),
    "falcon, one norm": (
        "input_layernorm > self_attention.query_key_value mlp.dense_h_to_4h",
        "self_attention.query_key_value qkv_by_group > self_attention.dense",
    ),
    "falcon, alibi": BLOOM,
    "mpt": ("norm_1 > attn.Wqkv", "attn.Wqkv qkv > attn.out_proj", "norm_2 > ffn.up_proj"),
    "opt": (
        f"self_attn_layer_norm > {QKV}",
        "self_attn.v_proj > self_attn.out_proj",
        "final_layer_norm > fc1",
        "fc1 > fc2",
    ),
    "opt, norms behind": ("self_attn.v_proj > self_attn.out_proj", "fc1 > fc2"),
    "gptj": ("ln_1 > attn.q_proj attn.k_proj attn.v_proj mlp.fc_in", "attn.v_proj > attn.out_proj"),
    "mixtral": MIXTRAL,
    "qwen2_moe": SHARED,
    "qwen2_moe, last block dense": SHARED,
    "qwen3_moe": EXPERTS,
    "qwen3_moe, first block dense": LLAMA,
    "olmoe": EXPERTS,
    "gemma": (f"input_layernorm+1 > {QKV}", VALUES, f"post_attention_layernorm+1 > {GATE_UP}", UP),
    "cohere": SIDE_BY_SIDE,
    "cohere2": SIDE_BY_SIDE,
    "granite": LLAMA,
    "smollm3": LLAMA,
    "stablelm": LLAMA,
    "stablelm, side by side": SIDE_BY_SIDE,
    "olmo": (UP,),  # norms without weights, and values that are cut off
    "olmo3": BEHIND,
    "glm4": GLM,
    "exaone4": BEHIND,
    "nemotron": (f"input_layernorm+1 > {QKV}", VALUES, "post_attention_layernorm+1 > mlp.up_proj"),
    "seed_oss": LLAMA,
    "ernie4_5": LLAMA,
    "hunyuan_v1_dense": LLAMA,
    "bloom": BLOOM,
    "glm": GLM,
    "apertus": (f"attention_layernorm > {QKV}", VALUES, "feedforward_layernorm > mlp.up_proj"),
    "arcee": (*LLAMA[:2], "post_attention_layernorm > mlp.up_proj"),
    "helium": LLAMA,
    "ministral": LLAMA,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "phimoe": MIXTRAL,
    "granitemoe": tuple(one.replace("moe.gate", "moe.router.layer") for one in MIXTRAL),
    "llama4": tuple(one.replace("mlp.", "feed_forward.") for one in LLAMA),
    # Its experts cut values off, and add one to what the second matrix gives.
    "gpt_oss": (*LLAMA[:2], EXPERTS[2].replace("mlp.gate", "mlp.router")),
    "qwen3_next": (
        "input_layernorm+1 > linear_attn.in_proj_qkvz linear_attn.in_proj_ba",
        SHARED[2].replace("norm >", "norm+1 >"),
        *SHARED[3:],
    ),
    "lfm2": CONVOLUTION,
    "glm4_moe": LLAMA,
    "lfm2_moe": CONVOLUTION,
    "flex_olmo": (VALUES, EXPERTS_UP),
    "dots1": LLAMA,
    "hunyuan_v1_moe": (
        *LLAMA[:2],
        "post_attention_layernorm > mlp.experts.*.gate_proj mlp.experts.*.up_proj mlp.shared_mlp.gate_proj "
        "mlp.shared_mlp.up_proj & mlp.gate.wg",
        "mlp.shared_mlp.up_proj > mlp.shared_mlp.down_proj",
        EXPERTS_UP,
    ),
    "qwen3_5": (DELTA, f"post_attention_layernorm+1 > {GATE_UP}", UP),
    "qwen3_5_moe": (DELTA, SHARED[2].replace("norm >", "norm+1 >"), *SHARED[3:]),
    "glm4_moe_lite": LATENT,
    "ministral3": LLAMA,
    "minimax_m2": MIXTRAL,
    "ernie4_5_moe": LLAMA,
    "granitemoehybrid": (
        "input_layernorm > mamba.in_proj",
        "mamba.norm > mamba.out_proj",
        MIXTRAL[2].replace(" & block_sparse_moe.gate", " shared_mlp.input_linear & block_sparse_moe.router.layer"),
        MIXTRAL[3],
        "shared_mlp.input_linear gate_up > shared_mlp.output_linear",
    ),
    "solar_open": (
        *LLAMA[:2],
        "post_attention_layernorm > mlp.experts.*.gate_proj mlp.experts.*.up_proj mlp.shared_experts.gate_proj "
        "mlp.shared_experts.up_proj & mlp.gate",
        EXPERTS_UP,
        "mlp.shared_experts.up_proj > mlp.shared_experts.down_proj",
    ),
    # What the norm before attention and state space gives goes to both.
    "falcon_h1": (
        VALUES,
        "pre_ff_layernorm > feed_forward.up_proj feed_forward.gate_proj",
        "feed_forward.up_proj > feed_forward.down_proj",
    ),
    "jais2": (*LLAMA[:2], "post_attention_layernorm > mlp.up_proj"),
    "exaone_moe": LLAMA,
    # Values have a norm of their own; what Gemma 3n's laurel reads is added to its output.
    "gemma4": GEMMA4,
    "gemma4, experts": (
        *GEMMA4,
        "pre_feedforward_layernorm_2 > experts.*.gate_proj experts.*.up_proj",
        "experts.*.up_proj > experts.*.down_proj",
    ),
    "gemma3n": ("laurel.linear_left > laurel.linear_right", *GEMMA4[1:]),
    # A squared ReLU lets no scales through.
    **dict.fromkeys(("nemotron_h", "nemotron_h, experts"), ("norm > mixer.in_proj", "mixer.norm > mixer.out_proj")),
}


def text(scaling: Scaling) -> str:
    """before[+1] [how it is fused] > layers [& what follows], experts as one."""
    layers = dict.fromkeys(re.sub(r"experts\.\d+\.", "experts.*.", name) for name in scaling.layers)
    before = re.sub(r"experts\.\d+\.", "experts.*.", scaling.before)
    parts = [f"{before}+1" if scaling.offset else before, scaling.fused, ">", *layers]
    parts += ["&", *scaling.follow] if scaling.follow else []
    return " ".join(part for part in parts if part)


def scalings(name: str, **changes: Any) -> list[list[Scaling]]:
    tiny = ARCHITECTURES[name]
    settings = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1} | tiny.settings | changes
    config = getattr(transformers, tiny.config)(**settings).to_dict() | {"architectures": ["CausalLM"]}
    return provable_scalings(open_skeleton(config), config)


def test_a_skeleton_is_tried_once_and_another_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    real = awq_folds.stand_ins
    monkeypatch.setattr(awq_folds, "stand_ins", lambda *given: tried.append(given) or real(*given))
    config = transformers.LlamaConfig(**ARCHITECTURES["llama"].settings).to_dict() | {"architectures": ["CausalLM"]}
    first, second = open_skeleton(config), open_skeleton(config | {"attention_bias": True})
    assert provable_scalings(first, config) is provable_scalings(first, config)
    assert provable_scalings(second, config) is not provable_scalings(first, config)
    assert [given[0] for given in tried] == [first, second]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_scalings_that_are_found_are_those_that_are_known(name: str) -> None:
    assert tuple(dict.fromkeys(text(one) for one in scalings(name)[0])) == KNOWN[name]


def test_a_block_that_takes_keys_and_values_has_scalings_without_them() -> None:
    blocks = [[text(one) for one in block] for block in scalings("gemma4")]
    assert blocks[1] == list(GEMMA4)
    assert blocks[2] == blocks[3] == ["input_layernorm > self_attn.q_proj", *GEMMA4[1:]]


class Sharing(nn.Module):
    """Two layers one after the other; perhaps what is between them is also for later blocks."""

    def __init__(self, share: bool) -> None:
        super().__init__()
        self.one, self.other, self.share = nn.Linear(8, 8), nn.Linear(8, 8), share

    def forward(self, x: torch.Tensor, shelf: dict[str, tuple[torch.Tensor, ...]]) -> torch.Tensor:
        y = self.one(x)
        if self.share:
            shelf["keys"] = (y,)
        return self.other(y)


@pytest.mark.parametrize("share", [False, True])
def test_what_is_for_later_blocks_is_not_scaled(share: bool) -> None:
    module, settings = Sharing(share), transformers.LlamaConfig(**ARCHITECTURES["llama"].settings)
    stand_in.fill(module)
    block = stand_in.StandIn([0], module, (({},), {}), torch.randn(1, 5, 8), ("one", "other"), settings)
    assert [text(one) for one in awq_folds._proven(block)] == ([] if share else ["one > other"])


def test_blocks_of_several_kinds_have_each_their_own() -> None:
    first, *others = ([text(one) for one in block] for block in scalings("qwen3_moe, first block dense"))
    assert first == list(LLAMA)
    assert len(others) == 2
    assert all(len(other) == len(LLAMA) - 1 + 4 for other in others)  # four experts
    *others, last = ([text(one) for one in block] for block in scalings("qwen2_moe, last block dense"))
    assert last == list(LLAMA)
    assert len(others) == 2


def test_blocks_of_experts_behind_other_blocks_are_scaled_as_such() -> None:
    for name, norm, layers, follow in (
        ("deepseek_v3", "post_attention_layernorm", "mlp.shared_experts.gate_proj", "mlp.gate"),
        ("llama4", "post_attention_layernorm", "feed_forward.shared_expert.gate_proj", "feed_forward.router"),
        ("lfm2_moe", "ffn_norm", "feed_forward.experts.3.w3", "feed_forward.gate"),
    ):
        scaling = next(one for one in scalings(name)[1] if one.before == norm)
        assert layers in scaling.layers
        assert any(".experts.3." in one for one in scaling.layers)
        assert scaling.follow == (follow,)


def test_every_expert_is_scaled_by_itself_and_the_norm_for_all() -> None:
    block = scalings("mixtral")[0]
    names = [f"block_sparse_moe.experts.{i}" for i in range(4)]
    norm = next(one for one in block if one.before == "post_attention_layernorm")
    assert norm.layers == (*(f"{name}.w1" for name in names), *(f"{name}.w3" for name in names))
    inner = [(one.before, one.layers) for one in block if ".experts." in one.before]
    assert inner == [(f"{name}.w3", (f"{name}.w2",)) for name in names]


@pytest.mark.parametrize("name", ["gemma2", "phi3", "gpt_neox", "mixtral", "qwen2_moe, last block dense"])
def test_large_blocks_are_tried_as_narrower_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Wider than the trial, with more experts: nothing of the original's sizes is left in what is run.
    wide = {"intermediate_size": 512, "num_experts": 9, "num_local_experts": 9}
    wide = {key: value for key, value in wide.items() if key in ARCHITECTURES[name].settings}
    want = scalings(name, **wide)
    monkeypatch.setattr(stand_in, "LARGE_BLOCK", 0)
    sizes = []
    fill = stand_in.fill

    def note(module: Any) -> None:
        sizes.append(sum(value.numel() for value in module.parameters()))
        fill(module)

    monkeypatch.setattr(stand_in, "fill", note)
    assert scalings(name, **wide) == want
    narrow = max(sizes)
    monkeypatch.setattr(stand_in, "LARGE_BLOCK", 1 << 40)
    scalings(name, **wide)
    assert not wide or narrow < max(sizes)


@pytest.mark.parametrize(("name", "groups"), [("llama", [[0, 1, 2]]), ("gemma3", [[0, 2], [1]])])
def test_blocks_of_other_settings_are_tried_apart(name: str, groups: list[list[int]]) -> None:
    settings = {"vocab_size": VOCABULARY} | ARCHITECTURES[name].settings
    config = getattr(transformers, ARCHITECTURES[name].config)(**settings).to_dict()
    skeleton = open_skeleton(config | {"architectures": ["CausalLM"]})
    assert [one.indices for one in stand_in.stand_ins(skeleton, config)] == groups


def test_a_fold_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only wrong ways to fold are offered, none is taken."""
    monkeypatch.setattr(awq_folds, "OFFSETS", (0.5, 1.0))
    monkeypatch.setattr(awq_folds, "FUSED", ("qkv", "kv_by_head"))
    assert [text(one) for one in scalings("llama")[0]] == []
    assert [text(one) for one in scalings("gpt_neox")[0]] == ["attention.query_key_value kv_by_head > attention.dense"]
    assert [text(one) for one in scalings("gemma")[0]] == [KNOWN["gemma"][0], KNOWN["gemma"][2]]


def test_values_that_are_cut_off_far_from_the_usual_are_seen() -> None:
    assert [text(one) for one in scalings("olmo", clip_qkv=None)[0]] == [VALUES, UP]
    assert [text(one) for one in scalings("olmo", clip_qkv=100.0)[0]] == [UP]


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_ways_to_fuse_that_fit_give_rows_for_whole_heads(heads: int) -> None:
    columns = 32
    for fused in FUSED:
        for rows in range(1, 200):
            if fits(fused, rows, columns, heads):
                chosen = rows_before(fused, rows, columns, heads)
                assert columns % len(chosen) == 0
                assert len(set(chosen.tolist())) == len(chosen)
                assert 0 <= min(chosen) <= max(chosen) < rows


def test_layers_that_nothing_can_be_folded_before_are_told_and_counted(tmp_path: Any) -> None:
    folder = save_architecture(tmp_path / "model", "nemotron")
    artifact = converted(folder, tmp_path / "out", "awq", group_size=32, n_grid=2)
    [note] = [note for note in artifact.manifest.notes if "AWQ" in note]
    assert note == (
        "AWQ scales no inputs of 3 of 18 linear layers, which are rounded as they are, because nothing before them can "
        "take the inverse: mlp.down_proj"
    )


def test_an_architecture_without_any_is_refused_before_the_work(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_architecture(tmp_path / "model", "olmo")
    monkeypatch.setattr(awq_folds, "FUSED", ("qkv",))
    with pytest.raises(UnsupportedError, match="AWQ finds no layer in the blocks of 'olmo' whose inputs could be"):
        job_for(folder, "awq")
