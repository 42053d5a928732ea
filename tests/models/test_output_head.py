"""Logits that come back from last hidden states, against the whole model's, for every architecture."""

import pytest
import torch
from test_architectures import each_architecture
from tiny_architectures import POSITIONS, save_architecture, whole_model

from quantkit.evaluation.baseline import SourceHead
from quantkit.formats.source import open_source
from quantkit.models.output_head import OutputHead, last_states, load_head
from quantkit.models.skeleton import open_skeleton

IDS = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))


def check_head(folder):
    """Last hidden states give the model's own logits, in the model, by the source's output layer and by a skeleton."""
    model, source = whole_model(folder), open_source(str(folder))
    head = SourceHead(source)
    with torch.inference_mode():
        want = model(input_ids=IDS, use_cache=False).logits
        states = last_states(model, IDS)
        got = OutputHead(model).logits(states.flatten(0, 1)).view_as(want)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
        # The model itself is as it was.
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, want)
    assert head.width == states.shape[-1]
    assert torch.allclose(torch.from_numpy(head.logits(states[0].numpy())), want[0], rtol=1e-4, atol=1e-4)

    model, skeleton = whole_model(folder, torch.bfloat16), open_skeleton(source.config)
    own = open_skeleton(source.config, native=True).blocks_path  # some checkpoints call it otherwise
    last = model.get_submodule(f"{own}.{len(skeleton.blocks) - 1}")
    outs = []
    last.register_forward_hook(lambda _m, _a, out: outs.append(out))
    loaded = load_head(source, skeleton, torch.device("cpu"), torch.bfloat16)
    with torch.no_grad():
        want = model(input_ids=torch.arange(40)[None] % 60).logits[0]
        as_tuple = isinstance(outs[0], tuple)
        hidden = (outs[0][0] if as_tuple else outs[0]).squeeze(-3)
        assert torch.equal(loaded.logits(hidden, as_tuple), want)
        # Also for more positions than the model has; a product of more rows may sum in another order.
        many = loaded.logits(torch.cat([hidden] * (POSITIONS // 40 + 1), -2), as_tuple)
        assert len(many) > POSITIONS
        assert (many[-40:].float() - want.float()).abs().max() <= 2**-7 * want.abs().max()
    assert {parameter.device.type for parameter in skeleton.model.parameters()} == {"meta"}


@each_architecture
def test_last_states_give_the_model_s_own_logits(name, architecture, monkeypatch):
    monkeypatch.setattr("quantkit.models.output_head.SLAB_ELEMENTS", 10 * 64)  # several slabs, the last one shorter
    check_head(architecture(name))


@pytest.mark.parametrize("kind", ["minicpm3", "modernbert-decoder"])
def test_what_a_head_does_before_its_output_layer_is_done_once(kind, tmp_path):
    """MiniCPM3 divides the states by a number, others have a layer and a norm there."""
    changes = {"head_dim": 24, "num_key_value_heads": 4} if kind == "minicpm3" else {}
    check_head(save_architecture(tmp_path / "model", kind, changes=changes))
