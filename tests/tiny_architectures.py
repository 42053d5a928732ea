"""A tiny random checkpoint of every architecture that is promised. A new one is a line of `ARCHITECTURES`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_llama import VOCABULARY, save_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from quantkit.numerics.matmul import use_products

HIDDEN, INNER, LAYERS, HEADS, POSITIONS = 64, 128, 3, 4, 128
NAMES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
}
GROUPED = {**NAMES, "num_key_value_heads": 2}
OLD_NAMES = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Tiny:
    """One architecture: its configuration's class, settings, and the linear layers of a block that are quantized.

    `not_gguf` is what the refusal to make a GGUF file of it says, where llama.cpp cannot compute it.
    """

    config: str
    linears: int
    settings: dict[str, Any] = field(default_factory=dict)
    not_gguf: str = ""

    @property
    def kind(self) -> str:
        return str(getattr(transformers, self.config).model_type)


ARCHITECTURES = {
    "llama": Tiny("LlamaConfig", 7, {**GROUPED, "pad_token_id": VOCABULARY - 1}),
    "llama, tied": Tiny("LlamaConfig", 7, {**GROUPED, "tie_word_embeddings": True, "attention_bias": True}),
    "mistral": Tiny("MistralConfig", 7, {**GROUPED, "sliding_window": 16}),
    "qwen2": Tiny("Qwen2Config", 7, {**GROUPED, "use_sliding_window": False}),
    "qwen3": Tiny("Qwen3Config", 7, {**GROUPED, "head_dim": 32}),
    "gemma2": Tiny("Gemma2Config", 7, {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}),
    "gemma3": Tiny(
        "Gemma3TextConfig",
        7,
        {
            **GROUPED,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi": Tiny("PhiConfig", 6, NAMES),
    "phi3": Tiny("Phi3Config", 4, {**GROUPED, "pad_token_id": VOCABULARY - 1}),
    "phi3, long": Tiny(
        "Phi3Config",
        4,
        {
            **GROUPED,
            "pad_token_id": VOCABULARY - 1,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.5, 2.0, 3.0],
                "long_factor": [2.0, 4.0, 6.0, 9.0],
            },
        },
    ),
    "starcoder2": Tiny("Starcoder2Config", 6, GROUPED),
    "olmo2": Tiny("Olmo2Config", 7, {**GROUPED, "pad_token_id": VOCABULARY - 1}),
    "gpt2": Tiny("GPT2Config", 4, OLD_NAMES),
    "gpt_neox": Tiny("GPTNeoXConfig", 4, NAMES),
    "gpt_neox, one after the other": Tiny("GPTNeoXConfig", 4, {**NAMES, "use_parallel_residual": False}),
    "gpt_neox, tied": Tiny("GPTNeoXConfig", 4, {**NAMES, "tie_word_embeddings": True}),
    "falcon, one key-value head": Tiny("FalconConfig", 4, NAMES),
    "falcon, grouped": Tiny("FalconConfig", 4, {**NAMES, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, one norm": Tiny(
        "FalconConfig",
        4,
        {**NAMES, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon, alibi": Tiny(
        "FalconConfig",
        4,
        {**NAMES, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        not_gguf="alibi = True; llama.cpp computes False",
    ),
    "mpt": Tiny("MptConfig", 4, {"d_model": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": POSITIONS}),
    "opt": Tiny("OPTConfig", 6, {**NAMES, "ffn_dim": INNER, "word_embed_proj_dim": 32}),
    "opt, norms behind": Tiny("OPTConfig", 6, {**NAMES, "ffn_dim": INNER, "do_layer_norm_before": False}),
    "gptj": Tiny("GPTJConfig", 6, {**OLD_NAMES, "rotary_dim": 8}),
    "mixtral": Tiny("MixtralConfig", 16, {**EXPERTS, "num_local_experts": 4}),
    "qwen2_moe": Tiny(
        "Qwen2MoeConfig",
        19,
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
    ),
    "qwen2_moe, last block dense": Tiny(
        "Qwen2MoeConfig",
        15,
        {
            **EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "mlp_only_layers": [2],
        },
    ),
    "qwen3_moe": Tiny(
        "Qwen3MoeConfig", 16, {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}
    ),
    "qwen3_moe, first block dense": Tiny(
        "Qwen3MoeConfig",
        13,
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [0], "norm_topk_prob": True},
        not_gguf=r"mlp_only_layers = \[0\]",
    ),
    "olmoe": Tiny("OlmoeConfig", 16, {**EXPERTS, "num_experts": 4}),
}


def save_architecture(
    folder: Path,
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    change: Callable[[Any], object] = lambda _model: None,
    changes: dict[str, Any] | None = None,
    **how: Any,
) -> Path:
    """Random weights and biases, norms far from one: what is folded wrongly must show.

    `changes` are other settings, `change` may change the model before it is saved; `how` goes to `save_pretrained`.
    """
    tiny = ARCHITECTURES[name]
    settings = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1} | tiny.settings | (changes or {})
    config = getattr(transformers, tiny.config)(**settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0, 0.1)
        change(model)
    model.to(dtype).save_pretrained(folder, **how)
    save_tokenizer(folder)
    return folder


def whole_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers loads it; parameters in `dtype`, buffers in float32, experts one after the other.

    Linear layers multiply as quantkit's do, which test_matmul.py holds against float64.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(parameter.data.to(dtype), requires_grad=False))
    model.tie_weights()
    use_products(model)
    return model
