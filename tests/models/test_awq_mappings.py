"""Scales are folded through what lets them through: not through a GELU, nor through values that are cut off."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_architectures import save_architecture, whole_model

from quantkit.formats.source import open_source
from quantkit.models.awq_folds import provable_scalings
from quantkit.models.awq_mappings import Scaling, fold, heads_of
from quantkit.models.skeleton import Skeleton, load, open_skeleton, set_parameter

OPT = {"self_attn.q_proj", "self_attn.out_proj", "fc1"}
OLMOE = {"self_attn.q_proj", *(f"mlp.experts.{i}.down_proj" for i in range(4)), "mlp.experts.0.gate_proj"}
# architecture, changed settings, the first layer of every scaling that is left
CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "opt, relu": ("opt", {}, {*OPT, "fc2"}),
    "opt, gelu": ("opt", {"activation_function": "gelu"}, OPT),
    "opt, silu": ("opt", {"activation_function": "silu"}, OPT),
    "opt, squared relu": ("opt", {"activation_function": "relu2"}, OPT),
    "mpt": ("mpt", {}, {"attn.Wqkv", "attn.out_proj", "ffn.up_proj"}),
    "mpt, values cut off": ("mpt", {"attn_config": {"clip_qkv": 0.5}}, {"attn.Wqkv", "ffn.up_proj"}),
    "olmoe": ("olmoe", {}, {*OLMOE, "self_attn.o_proj"}),
    "olmoe, values cut off": ("olmoe", {"clip_qkv": 0.5}, OLMOE),
}


def filled(folder: Path) -> Skeleton:
    source = open_source(str(folder))
    skeleton = open_skeleton(source.config)
    for name in skeleton.parameter_names():
        set_parameter(skeleton.model, name, load(source, skeleton, name).float())
    skeleton.model.tie_weights()
    return skeleton


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(40).reshape(2, 20) * 7 % 300).logits
    return logits


def fold_any_scale(skeleton: Skeleton, scalings: list[list[Scaling]]) -> set[str]:
    """Fold scales between 1/3 and 3 in every block; return the first layers of the scalings."""
    firsts = set()
    config = skeleton.model.config
    for index, block in enumerate(skeleton.blocks):
        values = {key: value.data.clone() for key, value in block.named_parameters()}
        for scaling in scalings[index]:
            heads = heads_of(scaling, values, "", config)
            columns = values[f"{scaling.layers[0]}.weight"].shape[1]
            drawn = torch.rand(heads[1], 1, columns // heads[0], generator=torch.Generator().manual_seed(columns))
            scale = torch.exp(drawn * 2.2 - 1.1).expand(heads[1], heads[0] // heads[1], -1).reshape(-1)
            fold(scaling, values, "", scale, heads)
            firsts.add(scaling.layers[0])
        for key, value in values.items():
            set_parameter(block, key, value)
    return firsts


@pytest.mark.parametrize("case", CASES)
def test_what_is_folded_leaves_the_model_as_it_is(case: str, tmp_path: Path) -> None:
    name, changes, want = CASES[case]
    folder = save_architecture(tmp_path / "model", name, dtype=torch.float32, changes=changes)
    exact = logits_of(whole_model(folder))
    skeleton = filled(folder)
    firsts = fold_any_scale(skeleton, provable_scalings(skeleton, open_source(str(folder)).config))
    assert (logits_of(skeleton.model) - exact).abs().max() < 1e-4 * exact.abs().max()
    assert firsts == want


@pytest.mark.parametrize(
    ("name", "changes", "scaling"),
    [
        ("opt", {"activation_function": "gelu"}, Scaling("fc1", ("fc2",))),
        ("mpt", {"attn_config": {"clip_qkv": 0.5}}, Scaling("attn.Wqkv", ("attn.out_proj",), fused="qkv")),
        ("olmoe", {"clip_qkv": 0.5}, Scaling("self_attn.v_proj", ("self_attn.o_proj",))),
    ],
)
def test_what_is_left_out_would_change_the_model(
    name: str, changes: dict[str, Any], scaling: Scaling, tmp_path: Path
) -> None:
    """So that the test above sees it."""
    folder = save_architecture(tmp_path / "model", name, dtype=torch.float32, changes=changes)
    exact, skeleton = logits_of(whole_model(folder)), filled(folder)
    fold_any_scale(skeleton, [[scaling]] * len(skeleton.blocks))
    assert (logits_of(skeleton.model) - exact).abs().max() > 0.05 * exact.abs().max()
