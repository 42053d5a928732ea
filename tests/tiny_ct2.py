"""Tiny random checkpoints and their CTranslate2 artifacts, for the tests of the method and the engine."""

import struct

import torch
import transformers
from tiny_architectures import GROUPED
from tiny_llama import trained
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trials import prepared

from quantkit.records.artifact import Artifact, Manifest, SourceEntry

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<|endoftext|>"}
VOCABULARY = 296  # a multiple of 8, as CTranslate2's OPT loader wants it
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3}
SIZES = {**GROUPED, "num_hidden_layers": 2, "max_position_embeddings": 512, "vocab_size": VOCABULARY, **IDS}
# By their numbers in `model.bin`; the engine has no seventh.
KINDS = ("float32", "int8", "int16", "int32", "float16", "bfloat16", "unknown")
GPT_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
FALCON = {"alibi": False, "bias": False}
OLD_FALCON, NEW_FALCON = ({**FALCON, "new_decoder_architecture": new} for new in (False, True))
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
GEMMA3 = {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 6, "sliding_window": 512}
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512, "final_logit_softcapping": 5.0,
}  # fmt: skip
# name of a case: (configuration class, settings besides SIZES)
EXACT = {
    "llama": ("LlamaConfig", {}),
    "llama tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama linear rope": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", GEMMA3),
    "gemma4": ("Gemma4TextConfig", {**GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4 unified": ("Gemma4UnifiedTextConfig", {**GEMMA4, "attention_k_eq_v": False}),
    "gpt2": ("GPT2Config", GPT_SIZES),
    "gpt_bigcode": ("GPTBigCodeConfig", GPT_SIZES),
    "gptj": ("GPTJConfig", {**GPT_SIZES, "rotary_dim": 8}),
    "opt": ("OPTConfig", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "opt projected": ("OPTConfig", {"ffn_dim": 128, "word_embed_proj_dim": 32}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "falcon multi-query": ("FalconConfig", {**OLD_FALCON, "multi_query": True}),
    "falcon multi-head": ("FalconConfig", {**OLD_FALCON, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon grouped": ("FalconConfig", {**NEW_FALCON, "multi_query": False, "num_kv_heads": 2}),
}


def config_of(name, **settings):
    return getattr(transformers, name)(**{**SIZES, **settings})


def save_tokenizer(folder, special, size):
    texts = ["the quick brown fox jumps over the lazy dog and the cat looks on"] * 3
    tokenizer = trained(texts, size, list(SPECIAL.values()))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def save_checkpoint(folder, config, special=None, tokens=VOCABULARY):
    """A random float32 checkpoint with weights large enough to show a wrong formula, and a real tokenizer."""
    folder.mkdir(parents=True)
    save_tokenizer(folder, SPECIAL if special is None else special, tokens)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    model.save_pretrained(folder)
    return folder


def text(value):
    """As `model.bin` has it, as everything else is that follows."""
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def variable(name, shape, kind, data, count=None):
    count = len(data) if count is None else count
    return text(name) + struct.pack(f"<B{len(shape)}IBI", len(shape), *shape, KINDS.index(kind), count) + data


def convert(checkpoint, bits, folder):
    """What `quantkit.convert` does with the method, without the manifest."""
    trial = prepared(checkpoint, "ctranslate2", bits, folder)
    trial.check()
    trial.write()
    return trial


def artifact_of(trial):
    source = trial.source
    entry = SourceEntry(
        model="tiny", revision=None, architecture=source.architecture, parameters=1, hashes={}, config=source.config
    )
    weights = {"weight_files": ("model.bin",), "weight_bytes": 1, "bits_per_weight": 8}
    manifest = Manifest(
        recipe=trial.job.recipe, format="ctranslate2", options={}, source=entry, versions={}, files={}, **weights
    )
    return Artifact(trial.folder, manifest)


def reference_log_probs(checkpoint, ids):
    """(B, T) ids -> (B, T, V) float32 log-probabilities by transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.log_softmax(model(ids).logits, -1)
