"""From CTranslate2's variables back to the tensors of a Hugging Face checkpoint: names, order of rows, shapes.

It undoes what `TransformersConverter` of CTranslate2 4.8 does
(https://github.com/OpenNMT/CTranslate2/blob/master/python/ctranslate2/converters/transformers.py): queries, keys
and values fused into one weight, heads put in another order, GPT-2's weights transposed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit.checkpoints.rows import Rows, rows_of_array
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats.ctranslate2.model_file import Ct2Model

# rows of the fused weight (rows, ...) and the transformers configuration -> {module name: rows of the source}
Unfuse = Callable[[np.ndarray, Any], dict[str, np.ndarray]]

LEAVES = {"weight": "weight", "gamma": "weight", "beta": "bias", "bias": "bias", "encodings": "weight"}
LAYER = re.compile(r"decoder/layer_(\d+)/(.+)")
OPT_POSITION_OFFSET = 2


@dataclass(frozen=True)
class Layout:
    """Where one family keeps its modules: `whole` names outer ones, `parts` those of a layer, both by scope."""

    layers: str
    whole: dict[str, str]
    parts: dict[str, str]
    unfuse: Unfuse
    conv1d: bool = False


def _split_qkv(prefix: str, grouped: bool) -> Unfuse:
    def unfuse(fused: np.ndarray, config: Any) -> dict[str, np.ndarray]:
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads if grouped else heads
        size = len(fused) // (heads + 2 * kv_heads)
        q, k, v = np.split(fused, [heads * size, (heads + kv_heads) * size])
        return {f"{prefix}.q_proj": q, f"{prefix}.k_proj": k, f"{prefix}.v_proj": v}

    return unfuse


def _gptj_qkv(fused: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    parts = _split_qkv("attn", grouped=False)(fused, config)
    heads, rotary = config.num_attention_heads, config.rotary_dim
    for name in ("attn.q_proj", "attn.k_proj"):
        rows = parts[name].reshape(heads, -1, fused.shape[1]).copy()
        # CTranslate2 rotates halves, GPT-J neighbours: its first `rotary` rows of a head are (2, rotary / 2).
        halves = rows[:, :rotary].reshape(heads, 2, rotary // 2, -1)
        rows[:, :rotary] = halves.swapaxes(1, 2).reshape(heads, rotary, -1)
        parts[name] = rows.reshape(parts[name].shape)
    return parts


def _interleaved_qkv(name: str) -> Unfuse:
    """Bloom's and Falcon's fused weights are (heads, 3, size) rows, CTranslate2's (3, heads, size)."""

    def unfuse(fused: np.ndarray, config: Any) -> dict[str, np.ndarray]:
        by_kind = fused.reshape(3, config.num_attention_heads, -1, *fused.shape[1:])
        return {name: by_kind.swapaxes(0, 1).reshape(fused.shape)}

    return unfuse


def _falcon_qkv(fused: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    name, heads = "self_attention.query_key_value", config.num_attention_heads
    kv_heads = config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1
    if kv_heads == 1:
        return {name: fused}
    if kv_heads == heads:
        return _interleaved_qkv(name)(fused, config)
    size, rest = len(fused) // (heads + 2 * kv_heads), fused.shape[1:]
    q, k, v = np.split(fused, [heads * size, (heads + kv_heads) * size])
    groups = (q.reshape(kv_heads, -1, *rest), k.reshape(kv_heads, -1, *rest), v.reshape(kv_heads, -1, *rest))
    return {name: np.concatenate(groups, axis=1).reshape(fused.shape)}


def _kept(name: str) -> Unfuse:
    return lambda fused, _config: {name: fused}


_OUTER = {
    "decoder/embeddings": "model.embed_tokens",
    "decoder/layer_norm": "model.norm",
    "decoder/projection": "lm_head",
}
_LLAMA = Layout(
    layers="model.layers",
    whole=_OUTER,
    parts={
        "self_attention/layer_norm": "input_layernorm",
        "self_attention/q_norm": "self_attn.q_norm",
        "self_attention/k_norm": "self_attn.k_norm",
        "self_attention/linear_1": "self_attn.o_proj",
        "ffn/layer_norm": "post_attention_layernorm",
        "ffn/linear_0": "mlp.gate_proj",
        "ffn/linear_0_noact": "mlp.up_proj",
        "ffn/linear_1": "mlp.down_proj",
    },
    unfuse=_split_qkv("self_attn", grouped=True),
)
_GEMMA3 = Layout(
    layers="model.layers",
    whole=_OUTER,
    parts={
        **{scope: name for scope, name in _LLAMA.parts.items() if not scope.endswith("/layer_norm")},
        "input_layer_norm": "input_layernorm",
        "post_attention_layer_norm": "post_attention_layernorm",
        "pre_feedforward_layer_norm": "pre_feedforward_layernorm",
        "post_feedforward_layer_norm": "post_feedforward_layernorm",
    },
    unfuse=_LLAMA.unfuse,
)
_GPT_OUTER = {
    "decoder/embeddings": "transformer.wte",
    "decoder/position_encodings": "transformer.wpe",
    "decoder/layer_norm": "transformer.ln_f",
    "decoder/projection": "lm_head",
}
_GPT_PARTS = {
    "self_attention/layer_norm": "ln_1",
    "self_attention/linear_1": "attn.c_proj",
    "ffn/layer_norm": "ln_2",
    "ffn/linear_0": "mlp.c_fc",
    "ffn/linear_1": "mlp.c_proj",
}
_GPTJ = Layout(
    layers="transformer.h",
    whole=_GPT_OUTER,
    parts={
        "shared_layer_norm": "ln_1",
        "self_attention/linear_1": "attn.out_proj",
        "ffn/linear_0": "mlp.fc_in",
        "ffn/linear_1": "mlp.fc_out",
    },
    unfuse=_gptj_qkv,
)
_OPT = Layout(
    layers="model.decoder.layers",
    whole={
        "decoder/embeddings": "model.decoder.embed_tokens",
        "decoder/position_encodings": "model.decoder.embed_positions",
        "decoder/layer_norm": "model.decoder.final_layer_norm",
        "decoder/project_in": "model.decoder.project_in",
        "decoder/project_out": "model.decoder.project_out",
        "decoder/projection": "lm_head",
    },
    parts={
        "self_attention/layer_norm": "self_attn_layer_norm",
        "self_attention/linear_1": "self_attn.out_proj",
        "ffn/layer_norm": "final_layer_norm",
        "ffn/linear_0": "fc1",
        "ffn/linear_1": "fc2",
    },
    unfuse=_split_qkv("self_attn", grouped=False),
)
_BLOOM_OUTER = {
    "decoder/embeddings": "transformer.word_embeddings",
    "decoder/layernorm_embedding": "transformer.word_embeddings_layernorm",
    "decoder/layer_norm": "transformer.ln_f",
    "decoder/projection": "lm_head",
}
_BLOOM_PARTS = {
    "self_attention/layer_norm": "input_layernorm",
    "self_attention/linear_1": "self_attention.dense",
    "ffn/layer_norm": "post_attention_layernorm",
    "ffn/linear_0": "mlp.dense_h_to_4h",
    "ffn/linear_1": "mlp.dense_4h_to_h",
}
_FALCON_PARTS = {
    **_BLOOM_PARTS,
    "shared_layer_norm": "input_layernorm",
    "input_layer_norm": "ln_attn",
    "post_attention_layer_norm": "ln_mlp",
}

LAYOUTS: dict[str, Layout] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma3_text": _GEMMA3,
    "gpt2": Layout("transformer.h", _GPT_OUTER, _GPT_PARTS, _kept("attn.c_attn"), conv1d=True),
    "gpt_bigcode": Layout("transformer.h", _GPT_OUTER, _GPT_PARTS, _kept("attn.c_attn")),
    "gptj": _GPTJ,
    "opt": _OPT,
    "bloom": Layout("transformer.h", _BLOOM_OUTER, _BLOOM_PARTS, _interleaved_qkv("self_attention.query_key_value")),
    "falcon": Layout("transformer.h", _BLOOM_OUTER, _FALCON_PARTS, _falcon_qkv),
}


class SourceTensors:
    """The weights of a CTranslate2 model by the source's names, each dense float32 in the source's shape.

    `config` is the transformers configuration of the source. A tied output layer is left out, as in checkpoints.
    Raises UnsupportedError for an architecture without a layout, ArtifactError for a variable without a place.
    """

    def __init__(self, model: Ct2Model, config: Any) -> None:
        layout = LAYOUTS.get(config.model_type)
        if layout is None:
            raise UnsupportedError(
                f"quantkit cannot read the architecture {config.model_type!r} back from CTranslate2's files. "
                f"It reads: {', '.join(LAYOUTS)}."
            )
        self._model, self._layout, self._config = model, layout, config
        self._variables: dict[str, str] = {}
        for variable in sorted([*model.variables, *model.aliases]):
            shape = model.variables[model.aliases.get(variable, variable)].shape
            if not variable.startswith("decoder/") or not shape or variable.endswith("_scale"):
                continue  # settings (numbers of heads, rotary base, ...) and scales of codes
            scope, _, leaf = variable.rpartition("/")
            if leaf not in LEAVES:
                raise ArtifactError(f"{model.path}: the variable {variable} has no place in the architecture")
            if scope == "decoder/projection" and leaf == "weight" and config.tie_word_embeddings:
                continue
            # Which tensors a variable holds does not depend on its columns: one is enough to ask.
            one_column = np.zeros((shape[0], *(1 for _ in shape[1:])), np.float32)
            for name in self._tensors_in(variable, one_column):
                self._variables[name] = variable
        self._opened: tuple[str, dict[str, np.ndarray]] = ("", {})

    def names(self) -> list[str]:
        """All of them, in order."""
        return list(self._variables)

    def read(self, name: str) -> Rows:
        """One of them; raises ArtifactError for a name that is not there."""
        variable = self._variables.get(name)
        if variable is None:
            raise ArtifactError(f"{self._model.path} lacks the tensor {name}. Convert again with --force.")
        if self._opened[0] != variable:  # a fused variable is asked for several times in a row
            self._opened = (variable, self._tensors_in(variable, self._model.values(variable)))
        return rows_of_array(self._opened[1][name])

    def _tensors_in(self, variable: str, values: np.ndarray) -> dict[str, np.ndarray]:
        scope, _, leaf = variable.rpartition("/")
        return {f"{module}.{LEAVES[leaf]}": rows for module, rows in self._modules(scope, variable, values)}

    def _modules(self, scope: str, variable: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        layout, layer = self._layout, LAYER.fullmatch(scope)
        if layer is None and scope in layout.whole:
            if self._config.model_type == "opt" and scope == "decoder/position_encodings":
                # The converter drops the rows before position 0, which no unpadded text uses.
                values = np.concatenate([np.zeros_like(values[:OPT_POSITION_OFFSET]), values])
            yield layout.whole[scope], values
            return
        part = layer[2] if layer is not None else ""
        if layer is None or (part not in layout.parts and part != "self_attention/linear_0"):
            raise ArtifactError(f"{self._model.path}: the variable {variable} has no place in the architecture")
        fused = part == "self_attention/linear_0"
        modules = layout.unfuse(values, self._config) if fused else {layout.parts[part]: values}
        for module, rows in modules.items():
            yield f"{layout.layers}.{layer[1]}.{module}", np.ascontiguousarray(rows.T if layout.conv1d else rows)
