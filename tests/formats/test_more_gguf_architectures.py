"""GGUF files of the further architectures: what llama.cpp computes of each, and what is read back.

Each takes a CPU second or two, so they run only when they are asked for (`pytest -m slow`).
"""

from dataclasses import replace

import pytest
import test_gguf_architectures as plain
from test_gguf_architectures import known_tokenizer, made, no_kept_scores  # noqa: F401
from tiny_architectures import ARCHITECTURES, LAYERS, Tiny, save_architecture
from tiny_more import MORE, settings_of
from transformers import CONFIG_MAPPING

from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.architectures.known import KNOWN

pytestmark = pytest.mark.slow
SLIDING = ["sliding_attention"] * 3
# Settings that llama.cpp has; without them the tiny model is refused, with this reason.
NEEDED = {
    "afmoe": ({"mup_enabled": True}, "mup_enabled = False"),
    "hyperclovax": (
        {"use_post_norm": False, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
        "use_post_norm = True",
    ),
}


@pytest.fixture
def tiny(monkeypatch, request):
    kind = request.param
    found = Tiny(CONFIG_MAPPING[kind].__name__, MORE[kind] / LAYERS, settings_of(kind))
    monkeypatch.setitem(ARCHITECTURES, kind, replace(found, for_gguf=NEEDED.get(kind, ({}, ""))[0]))
    return kind


@pytest.mark.parametrize("tiny", [kind for kind in MORE if kind in KNOWN], indirect=True)
def test_an_architecture_in_llama_cpp_and_back(tmp_path, tiny, made):  # noqa: F811
    plain.test_llama_cpp_computes_what_transformers_computes(tiny, made)
    plain.test_file_reads_back_as_the_source(tiny, made)
    plain.test_file_imports_as_a_checkpoint_that_computes_the_same(tmp_path, tiny, made)


@pytest.mark.parametrize("tiny", NEEDED, indirect=True)
def test_settings_that_llama_cpp_lacks_are_refused(tmp_path, tiny):
    folder = save_architecture(tmp_path / "model", tiny)
    with pytest.raises(UnsupportedError, match=NEEDED[tiny][1]):
        plain.job_for(folder, "F16", tmp_path / "out").check()


@pytest.mark.parametrize("tiny", ["afmoe"], indirect=True)
def test_a_fourth_block_has_no_window_and_no_rope(tmp_path, tiny):
    changes = {"num_hidden_layers": 4, "layer_types": [*SLIDING, "full_attention"], **NEEDED[tiny][0]}
    folder = save_architecture(tmp_path / "model", tiny, dtype=plain.torch.float32, changes=changes)
    ids = plain.torch.randint(2, plain.VOCABULARY, (100,), generator=plain.torch.Generator().manual_seed(0)).tolist()
    ours = plain.logits_of_llama_cpp(plain.written(plain.job_for(folder, "F32", tmp_path / "out")), ids)
    theirs = plain.logits_of_transformers(folder, ids)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < plain.LIMIT_WITH_SILU


@pytest.mark.parametrize("tiny", ["internlm3"], indirect=True)
def test_a_rope_that_stretches_beyond_the_context_alone_is_the_plain_one_within(tmp_path, tiny):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0}
    folder = save_architecture(tmp_path / "model", tiny, dtype=plain.torch.float32, changes={"rope_parameters": rope})
    ids = plain.torch.randint(2, plain.VOCABULARY, (128,), generator=plain.torch.Generator().manual_seed(0)).tolist()
    ours = plain.logits_of_llama_cpp(plain.written(plain.job_for(folder, "F32", tmp_path / "out")), ids)
    theirs = plain.logits_of_transformers(folder, ids)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < plain.LIMIT_WITH_SILU
