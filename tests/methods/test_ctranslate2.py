import json
import struct
import sys

import numpy as np
import pytest
import tiny_ct2
import torch
from edits import edit_json, put
from engine_logits import engine_logits, logits_of
from gguf_files import slow_but
from tiny_ct2 import SPECIAL, VOCABULARY, artifact_of, config_of, convert, save_checkpoint, text, variable
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trials import dense_values, prepared

from quantkit.engines.ctranslate2 import Ct2Generator, saturates
from quantkit.errors import ArtifactError, DependencyError, UnsupportedError
from quantkit.formats.ctranslate2.architectures import refusal, refusal_of_config
from quantkit.formats.ctranslate2.model_file import open_ct2_model
from quantkit.methods.ctranslate2 import METHOD
from quantkit.models.config import load_tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("llama") / "source", config_of("LlamaConfig"))


@pytest.fixture(scope="module")
def int8(llama, tmp_path_factory):
    return convert(llama, "int8", tmp_path_factory.mktemp("int8") / "out")


def random_ids(length=96, vocabulary=VOCABULARY):
    return torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(3))


def engine_log_probs(folder, ids, compute_type="float32"):
    return torch.log_softmax(torch.from_numpy(engine_logits(Ct2Generator(folder, compute_type, 1), ids.numpy())), -1)


VARIABLES = (
    variable("a/weight", (2, 3), "int8", bytes([1, 2, 3, 255, 0, 128]))
    + variable("a/weight_scale", (2,), "float32", struct.pack("<2f", 2.0, 4.0))
    + variable("b/weight", (2,), "bfloat16", struct.pack("<2H", 0x3F80, 0xC040))
    + variable("c/weight", (3,), "int16", struct.pack("<3h", 10, -20, 30))
    + variable("c/weight_scale", (), "float32", struct.pack("<f", 10.0))
    + variable("d", (), "int32", struct.pack("<i", -7))
    + variable("e/weight", (1, 2), "float16", np.array([0.5, -2.0], np.float16).tobytes())
)
HEAD = struct.pack("<I", 6) + text("TransformerDecoderSpec") + struct.pack("<II", 8, 7)
ALIASES = struct.pack("<I", 1) + text("z/weight") + text("a/weight")
LITERAL = HEAD + VARIABLES + ALIASES
# Each has its own names or settings; formats/test_ct2_writer.py has the bytes of all.
QUICK = (
    *("llama tied", "llama bias", "llama linear rope", "qwen3", "gemma3", "gemma4", "gpt2", "gptj", "opt projected"),
    *("bloom", "falcon grouped"),
)


def test_model_bin_reads_literal_bytes(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(LITERAL)
    model = open_ct2_model(path)
    assert model.aliases == {"z/weight": "a/weight"}
    assert " ".join(model.variables) == "a/weight a/weight_scale b/weight c/weight c/weight_scale d e/weight"
    want = [[0.5, 1.0, 1.5], [-0.25, 0.0, -32.0]]
    assert model.values("a/weight").tolist() == want
    assert model.values("z/weight").tolist() == want
    assert model.values("b/weight").tolist() == [1.0, -3.0]
    assert model.values("c/weight").tolist() == [1.0, -2.0, 3.0]
    assert model.raw("d").tolist() == -7
    assert model.values("e/weight").tolist() == [[0.5, -2.0]]
    assert model.values("e/weight").dtype == np.float32
    with pytest.raises(ArtifactError, match="no variable f"):
        model.values("f")
    # Some rows, with their own scales.
    assert model.values("z/weight", 1, 2).tolist() == [[-0.25, 0.0, -32.0]]
    assert model.values("b/weight", 1).tolist() == [-3.0]
    assert model.values("c/weight", 0, 2).tolist() == [1.0, -2.0]
    assert model.values("c/weight", 2, 9).tolist() == [3.0]


@pytest.mark.parametrize(("data", "message"), [
    (LITERAL + b"\0", "1 bytes after its end"),
    (struct.pack("<I", 5) + LITERAL[4:], "binary version 5"),
    (LITERAL.replace(b"z/weight", b"z/w\xff\xfe\xfdt"), "is no string"),
    (HEAD + variable("a", (2,), "unknown", bytes(2)) + VARIABLES + ALIASES, "type number 6"),
])  # fmt: skip
def test_damaged_model_bin_is_refused(data, message, tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=message):
        open_ct2_model(path)


@pytest.mark.parametrize("case", slow_but(QUICK, tiny_ct2.EXACT))
def test_float32_is_exact_in_the_engine_and_reads_back_bit_for_bit(case, tmp_path):
    """Also where the configuration names a narrower type than the weights have."""
    name, settings = tiny_ct2.EXACT[case]
    checkpoint = save_checkpoint(tmp_path / "source", config_of(name, **settings))
    edit_json(checkpoint / "config.json", put("dtype", value="bfloat16"))
    trial = convert(checkpoint, "float32", tmp_path / "out")
    ids = random_ids()
    difference = (engine_log_probs(trial.folder, ids) - tiny_ct2.reference_log_probs(checkpoint, ids)).abs().max()
    assert difference < 3e-5
    read = dense_values(artifact_of(trial))
    assert set(read) == set(trial.source.tensors)
    for tensor, values in read.items():
        skipped = 2 if tensor.endswith("embed_positions.weight") else 0
        assert torch.equal(values[skipped:], trial.source.tensor(tensor)[skipped:]), tensor


def test_int8_values_lie_within_half_a_step_of_the_source_and_answer_as_the_engine(int8):
    read = dense_values(artifact_of(int8))
    assert set(read) == set(int8.source.tensors)
    for name, values in read.items():
        want = int8.source.tensor(name)
        if want.dim() == 1:
            assert torch.equal(values, want), name
            continue
        step = want.abs().amax(dim=1, keepdim=True) / 127
        assert ((values - want).abs() <= step * 0.5001).all(), name
        assert (values - want).abs().max() > step.min() * 0.4, name
    assert int8.tensor_types == {"float32": 5, "int8": 12}
    model = AutoModelForCausalLM.from_pretrained(int8.source.folder, dtype=torch.float32).eval()
    model.load_state_dict(read)
    ids = random_ids()
    reference = torch.log_softmax(logits_of(model, ids), -1)
    assert (engine_log_probs(int8.folder, ids) - reference).abs().max() < 2e-5
    native = (engine_log_probs(int8.folder, ids, "int8_float32") - reference).abs().mean()
    assert 1e-4 < native < (0.25 if saturates() else 0.05)


# fmt: off
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
THETAS = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
WINDOW = {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0}
OTHER_THETA = {"rope_type": "default", "rope_theta": 5e5}
REFUSED = {
    "llama3 rope": ("LlamaConfig", {"max_position_embeddings": 16384, "rope_parameters": LLAMA3}, "silently wrong"),
    "yarn rope": ("Qwen2Config", {"max_position_embeddings": 2048, "rope_parameters": YARN}, "'yarn' is not proven"),
    "head_dim": ("LlamaConfig", {"head_dim": 32}, "head_dim 32"),
    "activation": ("LlamaConfig", {"hidden_act": "gelu"}, "asks for 'gelu'"),
    "sliding window": ("MistralConfig", {"sliding_window": 32}, "sliding window of 32 tokens"),
    "qwen window": ("Qwen2Config", WINDOW, "ignores its sliding window"),
    "gemma theta": ("GemmaConfig", {"head_dim": 16, "rope_parameters": OTHER_THETA},
                    "rope_theta 10000.0 for Gemma, but config.json has 500000.0"),
    "gemma activation": ("GemmaConfig", {"head_dim": 16, "hidden_act": "silu"}, "hidden_act gelu_pytorch_tanh"),
    "gemma3 scalar": ("Gemma3TextConfig", {**tiny_ct2.GEMMA3, "query_pre_attn_scalar": 64}, "query_pre_attn_scalar 64"),
    "gemma3 theta": ("Gemma3TextConfig", {**tiny_ct2.GEMMA3, "rope_parameters": THETAS}, "rope_theta 1e"),
    "gemma4 layers": ("Gemma4TextConfig", tiny_ct2.GEMMA4, "hidden_size_per_layer_input 0, but config.json has 256"),
    "gemma4 rope": ("Gemma4UnifiedTextConfig", {**tiny_ct2.GEMMA4, "rope_parameters": THETAS}, "plain proportional"),
    "gemma4 blocks": ("Gemma4UnifiedTextConfig", {**tiny_ct2.GEMMA4, "layer_types": ["full_attention"] * 2},
                      "blocks of full and of sliding attention"),
    "falcon": ("FalconConfig", {"multi_query": True, "new_decoder_architecture": True}, "multi_query"),
    "gemma2": ("Gemma2Config", {"head_dim": 16}, "soft-capping"),
    "phi3": ("Phi3Config", {}, "renamed"),
    "mixtral": ("MixtralConfig", {}, "no loader"),
    "codegen": ("CodeGenConfig", {}, "it was not measured"),
}
# fmt: on


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_engine_computes_wrong_is_refused(case):
    name, settings, reason = REFUSED[case]
    config = config_of(name, **settings)
    said = refusal(config)
    assert reason in said
    known = reason in ("renamed", "no loader", "soft-capping", "it was not measured") or "window of" in reason
    assert refusal_of_config(config.to_dict()) == (said if known else None)


@pytest.mark.parametrize(("case", "bits"), [("activation", "int8"), ("gemma3 theta", "float32")])
def test_the_proof_finds_what_the_rules_would_have_missed(case, bits, tmp_path):
    name, settings, _ = REFUSED[case]
    checkpoint = save_checkpoint(tmp_path / "source", config_of(name, **settings))
    trial = prepared(checkpoint, "ctranslate2", bits, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="answers differently from transformers with the same weights"):
        trial.write()


def test_the_proof_finds_values_that_quantizing_lost_and_needs_the_engine(llama, tmp_path, monkeypatch, int8):
    monkeypatch.setitem(METHOD.write.__globals__["FROM_SOURCE"], "int8", 1e-4)
    with pytest.raises(UnsupportedError, match="answers differently from the source, for int8"):
        convert(llama, "int8", tmp_path / "out")
    assert any(note.startswith("checked against transformers on 96 tokens") for note in int8.notes)
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(DependencyError, match=r"quantkit-lm\[ctranslate2\]"):
        prepared(llama, "ctranslate2", "int8", tmp_path).check()


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path):
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": VOCABULARY + 8}
    checkpoint = save_checkpoint(tmp_path / "large", config_of("GPT2Config", **sizes))
    with pytest.raises(UnsupportedError, match=r"converter cannot convert .*Vocabulary has size 296"):
        convert(checkpoint, "float32", tmp_path / "out")


def test_missing_special_tokens_and_unused_ids_do_not_break_the_artifact(tmp_path):
    special = {"eos_token": SPECIAL["eos_token"]}
    config = config_of("MistralConfig", sliding_window=None)
    trial = convert(save_checkpoint(tmp_path / "source", config, special), "float32", tmp_path / "out")
    settings = json.loads((trial.folder / "config.json").read_text())
    assert settings["unk_token"] == settings["bos_token"] == ""
    assert settings["eos_token"] == "</s>"
    checkpoint = save_checkpoint(tmp_path / "unused", config_of("LlamaConfig", vocab_size=16))
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "<|endoftext|>": 3, "the": 7, "old": 11}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(checkpoint)
    trial = convert(checkpoint, "float32", tmp_path / "again")
    vocabulary = json.loads((trial.folder / "vocabulary.json").read_text())
    assert len(vocabulary) == len(set(vocabulary)) == 16
    assert {token: vocabulary.index(token) for token in words} == words


def test_the_tokenizer_does_not_depend_on_the_config_that_the_engine_replaces(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "source", config_of("Qwen2Config"))
    (checkpoint / "tokenizer_config.json").write_text("{}")
    trial = convert(checkpoint, "float32", tmp_path / "out")
    source, copied = trial.source.tokenizer(), load_tokenizer(trial.folder)
    assert type(copied) is type(source)
    assert copied("the lazy dog, 12 times")["input_ids"] == source("the lazy dog, 12 times")["input_ids"]
