"""What AWQ may scale in each architecture: found and proven by running blocks, held against what is known by hand."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from test_architectures import each_architecture
from tiny_architectures import ARCHITECTURES, VOCABULARY, save_architecture, whole_model
from tiny_llama import converted, job_for

from quantkit.errors import UnsupportedError
from quantkit.formats.source import open_source
from quantkit.models import awq_mappings, stand_in
from quantkit.models.awq_mappings import MAPPINGS, Scaling, fold, heads_of, provable_scalings
from quantkit.models.skeleton import load, open_skeleton, set_parameter

# By name in ARCHITECTURES: the scalings of the first block.
KNOWN = {}
for line in (Path(__file__).parent / "scalings.txt").read_text().splitlines()[2:]:
    names, found = line.split(": ")
    KNOWN |= dict.fromkeys(names.split(" | "), found.split("; "))
LLAMA, GEMMA4 = KNOWN["llama"], KNOWN["gemma4"]
VALUES, UP = LLAMA[1], LLAMA[3]


@pytest.fixture(autouse=True)
def probed(monkeypatch):
    """Nothing is looked up."""
    monkeypatch.setattr(awq_mappings, "MAPPINGS", {})


def text(scaling):
    """before[+1] [how it is fused] > layers [& what follows], experts as one."""
    layers = dict.fromkeys(re.sub(r"experts\.\d+\.", "experts.*.", name) for name in scaling.layers)
    before = re.sub(r"experts\.\d+\.", "experts.*.", scaling.before)
    parts = [f"{before}+1" if scaling.offset else before, scaling.fused, ">", *layers]
    parts += ["&", *scaling.follow] if scaling.follow else []
    return " ".join(part for part in parts if part)


def scalings(name, **changes):
    tiny = ARCHITECTURES[name]
    settings = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1} | tiny.settings | changes
    config = getattr(transformers, tiny.config)(**settings).to_dict() | {"architectures": ["CausalLM"]}
    return provable_scalings(open_skeleton(config), config)


def filled(folder):
    """The skeleton with all its values, in float32."""
    source = open_source(str(folder))
    skeleton = open_skeleton(source.config)
    for name in skeleton.parameter_names():
        set_parameter(skeleton.model, name, load(source, skeleton, name).float())
    skeleton.model.tie_weights()
    return skeleton


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(40).reshape(2, 20) * 7 % 300).logits


def fold_any_scales(skeleton, scalings):
    """Fold scales between 1/3 and 3, equal for query heads that read one value head, in every block."""
    for index, block in enumerate(skeleton.blocks):
        values = {key: value.data.clone() for key, value in block.named_parameters()}
        for scaling in scalings[index]:
            heads = heads_of(scaling, values, "", skeleton.model.config)
            before = dict(values)
            columns = values[f"{scaling.layers[0]}.weight"].shape[1]
            drawn = torch.rand(heads[1], 1, columns // heads[0], generator=torch.Generator().manual_seed(columns))
            scale = torch.exp(drawn * 2.2 - 1.1).expand(heads[1], heads[0] // heads[1], -1).reshape(-1)
            fold(scaling, values, "", scale, heads)
            for changed in (scaling.before, *scaling.layers, *scaling.follow):
                assert (values[f"{changed}.weight"] - before[f"{changed}.weight"]).norm() > 0.1
        for key, value in values.items():
            set_parameter(block, key, value)


def scaled_without_rounding(folder):
    """The skeleton computes what transformers does, before and after scales are folded where AWQ may."""
    want = logits_of(whole_model(folder))
    skeleton = filled(folder)
    assert (logits_of(skeleton.model) - want).abs().max() < 1e-5 * want.abs().max()
    found = provable_scalings(skeleton, open_source(str(folder)).config)
    fold_any_scales(skeleton, found)
    assert (logits_of(skeleton.model) - want).abs().max() < 1e-4 * want.abs().max()
    return found


@each_architecture
def test_what_is_scaled_is_known_and_leaves_the_model_as_it_is(name, architecture):
    found = scaled_without_rounding(architecture(name))
    assert list(dict.fromkeys(map(text, found[0]))) == KNOWN[name]


@pytest.mark.parametrize("name", [*MAPPINGS, "qwen3_moe, first block dense"])
def test_what_is_looked_up_is_what_would_be_found(name, monkeypatch):
    found = scalings(name)
    monkeypatch.setattr(awq_mappings, "MAPPINGS", MAPPINGS)
    monkeypatch.setattr(awq_mappings, "FUSED", ())
    assert scalings(name) == found


OPT = {"self_attn.q_proj", "self_attn.out_proj", "fc1"}
OLMOE = {"self_attn.q_proj", *(f"mlp.experts.{i}.down_proj" for i in range(4)), "mlp.experts.0.gate_proj"}
WQKV = Scaling("attn.Wqkv", ("attn.out_proj",), fused="qkv")
GELU, CUT_OFF = {"activation_function": "gelu"}, {"clip_qkv": 0.5}


@pytest.mark.parametrize(
    ("name", "changes", "firsts", "not_scaled"),
    [
        ("opt", {}, {*OPT, "fc2"}, None),
        ("opt", GELU, OPT, Scaling("fc1", ("fc2",))),
        ("mpt", {"attn_config": CUT_OFF}, {"attn.Wqkv", "ffn.up_proj"}, WQKV),
        ("olmoe", CUT_OFF, OLMOE, Scaling("self_attn.v_proj", ("self_attn.o_proj",))),
    ],
)
def test_nothing_is_scaled_through_a_gelu_or_values_that_are_cut_off(name, changes, firsts, not_scaled, tmp_path):
    folder = save_architecture(tmp_path / "model", name, changes=changes)
    assert {scaling.layers[0] for block in scaled_without_rounding(folder) for scaling in block} == firsts
    if not_scaled is not None:  # it would change the model
        want, skeleton = logits_of(whole_model(folder)), filled(folder)
        fold_any_scales(skeleton, [[not_scaled]] * len(skeleton.blocks))
        assert (logits_of(skeleton.model) - want).abs().max() > 0.05 * want.abs().max()


def test_blocks_of_several_kinds_have_each_their_own():
    blocks = [[text(one) for one in block] for block in scalings("gemma4")]
    assert blocks[1] == GEMMA4
    assert blocks[2] == blocks[3] == ["input_layernorm > self_attn.q_proj", *GEMMA4[1:]]  # takes keys and values
    assert [text(one) for one in scalings("qwen3_moe, first block dense")[0]] == LLAMA
    # Experts behind other blocks are scaled as such.
    for name, norm, layers, follow in (
        ("deepseek_v3", "post_attention_layernorm", "mlp.shared_experts.gate_proj", "mlp.gate"),
        ("lfm2_moe", "ffn_norm", "feed_forward.experts.3.w3", "feed_forward.gate"),
    ):
        scaling = next(one for one in scalings(name)[1] if one.before == norm)
        assert layers in scaling.layers
        assert any(".experts.3." in one for one in scaling.layers)
        assert scaling.follow == (follow,)


@pytest.mark.parametrize("name", ["phi3", "mixtral"])
def test_large_blocks_are_tried_as_narrower_ones(name, monkeypatch):
    # Wider than the trial, with more experts: nothing of the original's sizes is left in what is run.
    wide = {"intermediate_size": 512, "num_experts": 9, "num_local_experts": 9}
    wide = {key: value for key, value in wide.items() if key in ARCHITECTURES[name].settings}
    want = scalings(name, **wide)
    monkeypatch.setattr(stand_in, "LARGE_BLOCK", 0)
    sizes, fill = [], stand_in.fill

    def note(module):
        sizes.append(sum(value.numel() for value in module.parameters()))
        fill(module)

    monkeypatch.setattr(stand_in, "fill", note)
    assert scalings(name, **wide) == want
    narrow = max(sizes)
    monkeypatch.setattr(stand_in, "LARGE_BLOCK", 1 << 40)
    scalings(name, **wide)
    assert narrow < max(sizes)


def test_no_wrong_fold_is_taken(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(awq_mappings, "OFFSETS", (0.5, 1.0))
        patch.setattr(awq_mappings, "FUSED", ("qkv", "kv_by_head"))
        assert [text(one) for one in scalings("llama")[0]] == []
        [only] = scalings("gpt_neox")[0]
        assert text(only) == "attention.query_key_value kv_by_head > attention.dense"
        assert [text(one) for one in scalings("gemma")[0]] == [KNOWN["gemma"][0], KNOWN["gemma"][2]]
    # Nor where values are cut off far from the usual.
    assert [text(one) for one in scalings("olmo", clip_qkv=None)[0]] == [VALUES, UP]
    assert [text(one) for one in scalings("olmo", clip_qkv=100.0)[0]] == [UP]


def test_layers_that_nothing_can_be_folded_before_are_told_and_counted(architecture, tmp_path):
    artifact = converted(architecture("nemotron"), tmp_path / "out", "awq", group_size=32, n_grid=2)
    [note] = [note for note in artifact.manifest.notes if "AWQ" in note]
    assert note == (
        "AWQ scales no inputs of 3 of 18 linear layers, because nothing before them can take the inverse. They "
        "are only rounded: mlp.down_proj"
    )


def test_an_architecture_without_any_is_refused_before_the_work(architecture, monkeypatch):
    monkeypatch.setattr(awq_mappings, "FUSED", ("qkv",))
    with pytest.raises(UnsupportedError, match="AWQ finds no layer in the blocks of 'olmo' whose inputs it can scale"):
        job_for(architecture("olmo"), "awq")
