"""Architectures that CTranslate2 computes exactly (measured with 4.8.5, transformers 5.23), and its names for them.

`SourceTensors` undoes what CTranslate2's TransformersConverter does (python/ctranslate2/converters/transformers.py of
https://github.com/OpenNMT/CTranslate2): fusing Q, K and V, reordering heads, transposing weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from quantkit.checkpoints.rows import Rows, rows_of_array
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats.ctranslate2.model_file import AGAIN, Ct2Model
from quantkit.system.untrusted import reraise_as, shown

# (rows of the fused weight, transformers configuration, block) -> {module name: rows of the source}
Unfuse = Callable[[np.ndarray, Any, int], dict[str, np.ndarray]]

FULL, SLIDING = "full_attention", "sliding_attention"
LEAVES = {"weight": "weight", "gamma": "weight", "beta": "bias", "bias": "bias", "encodings": "weight"}
LAYER = re.compile(r"decoder/layer_(\d+)/(.+)")
SCALAR = "/layer_scalar"  # of Gemma 4's blocks
OPT_POSITION_OFFSET = 2


@dataclass(frozen=True)
class Family:
    """Module names of an architecture family by CTranslate2 scope: `whole` outside the layers, `parts` in a layer."""

    layers: str
    whole: dict[str, str]
    parts: dict[str, str]
    unfuse: Unfuse
    conv1d: bool = False


def _parts_of(fused: np.ndarray, heads: int, kv_heads: int) -> list[np.ndarray]:
    size = len(fused) // (heads + 2 * kv_heads)
    return np.split(fused, [heads * size, (heads + kv_heads) * size])


def _split_qkv(prefix: str, grouped: bool) -> Unfuse:
    def unfuse(fused: np.ndarray, config: Any, _block: int) -> dict[str, np.ndarray]:
        heads = config.num_attention_heads
        parts = _parts_of(fused, heads, config.num_key_value_heads if grouped else heads)
        return {f"{prefix}.{name}_proj": rows for name, rows in zip("qkv", parts, strict=True)}

    return unfuse


def _gptj_qkv(fused: np.ndarray, config: Any, block: int) -> dict[str, np.ndarray]:
    parts = _split_qkv("attn", grouped=False)(fused, config, block)
    heads, rotary = config.num_attention_heads, config.rotary_dim
    for name in ("attn.q_proj", "attn.k_proj"):
        rows = parts[name].reshape(heads, -1, fused.shape[1]).copy()
        # CTranslate2 rotates halves, GPT-J neighbours: CTranslate2's first `rotary` rows of a head are (2, rotary / 2).
        halves = rows[:, :rotary].reshape(heads, 2, rotary // 2, -1)
        rows[:, :rotary] = halves.swapaxes(1, 2).reshape(heads, rotary, -1)
        parts[name] = rows.reshape(parts[name].shape)
    return parts


def _grouped_qkv(fused: np.ndarray, config: Any, _block: int) -> dict[str, np.ndarray]:
    """Split Bloom's or Falcon's fused QKV weight, in which each key head's queries, key and value are adjacent."""
    kv_heads = heads = config.num_attention_heads
    if config.model_type == "falcon":
        kv_heads = config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1
    groups = [part.reshape(kv_heads, -1, *fused.shape[1:]) for part in _parts_of(fused, heads, kv_heads)]
    return {"self_attention.query_key_value": np.concatenate(groups, axis=1).reshape(fused.shape)}


def _gemma4_qkv(fused: np.ndarray, config: Any, block: int) -> dict[str, np.ndarray]:
    parts = _split_qkv("self_attn", grouped=True)(fused, config.per_layer_config[block], block)
    values = {"self_attn.v_proj": parts.pop("self_attn.v_proj")}
    copied = config.attention_k_eq_v and config.layer_types[block] == FULL  # from the keys
    return {name: _gemma4_rows(rows, config, block) for name, rows in parts.items()} | ({} if copied else values)


def _gemma4_rows(rows: np.ndarray, config: Any, block: int) -> np.ndarray:
    """Restore the source's order of rows in heads with full attention: CTranslate2 has the rotated ones first."""
    if config.layer_types[block] != FULL:
        return rows
    size = config.per_layer_config[block].head_dim
    rotated = int(size * config.rope_parameters[FULL].get("partial_rotary_factor", 1.0)) // 2
    (first, behind), (second, last) = (np.split(half, [rotated]) for half in np.split(np.arange(size), 2))
    order = np.argsort(np.concatenate([first, second, behind, last]))
    return rows.reshape(-1, size, *rows.shape[1:])[:, order].reshape(rows.shape)


def readable(settings: Any) -> Any:
    """Return a configuration as the converter reads it; raise ValueError for a Gemma 4 with unlike blocks of a kind."""
    if settings.model_type not in GEMMA4:
        return settings
    plain, full = (settings.per_layer_config[kind] for kind in (SLIDING, FULL))
    plain.global_head_dim = full.head_dim
    plain.num_global_key_value_heads = full.num_key_value_heads
    return plain


def _outer(embeddings: str, norm: str, **others: str) -> dict[str, str]:
    names = {"embeddings": embeddings, "layer_norm": norm, "projection": "lm_head", **others}
    return {f"decoder/{scope}": name for scope, name in names.items()}


def _inner(attention_norm: str, attention: str, norm: str, up: str, down: str) -> dict[str, str]:
    return {
        "self_attention/layer_norm": attention_norm,
        "self_attention/linear_1": attention,
        "ffn/layer_norm": norm,
        "ffn/linear_0": up,
        "ffn/linear_1": down,
    }


_LLAMA = Family(
    "model.layers",
    _outer("model.embed_tokens", "model.norm"),
    {
        **_inner("input_layernorm", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj"),
        "ffn/linear_0_noact": "mlp.up_proj",
        "self_attention/q_norm": "self_attn.q_norm",
        "self_attention/k_norm": "self_attn.k_norm",
    },
    _split_qkv("self_attn", grouped=True),
)
_GEMMA3_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
_GEMMA3_PARTS = {
    **{scope: name for scope, name in _LLAMA.parts.items() if not scope.endswith("/layer_norm")},
    **{f"{norm}_layer_norm": f"{norm}_layernorm" for norm in _GEMMA3_NORMS},
}
GEMMA4 = ("gemma4_text", "gemma4_unified_text")
_GEMMA4_PARTS = _GEMMA3_PARTS | {"self_attention/v_norm": ""}  # ones, which the source has not
_GPT_OUTER = _outer("transformer.wte", "transformer.ln_f", position_encodings="transformer.wpe")
_GPT2 = Family(
    "transformer.h",
    _GPT_OUTER,
    _inner("ln_1", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
    lambda fused, _config, _block: {"attn.c_attn": fused},
    conv1d=True,
)
_GPTJ_PARTS = {
    "shared_layer_norm": "ln_1",
    "self_attention/linear_1": "attn.out_proj",
    "ffn/linear_0": "mlp.fc_in",
    "ffn/linear_1": "mlp.fc_out",
}
_OPT = Family(
    "model.decoder.layers",
    _outer(
        "model.decoder.embed_tokens",
        "model.decoder.final_layer_norm",
        position_encodings="model.decoder.embed_positions",
        project_in="model.decoder.project_in",
        project_out="model.decoder.project_out",
    ),
    _inner("self_attn_layer_norm", "self_attn.out_proj", "final_layer_norm", "fc1", "fc2"),
    _split_qkv("self_attn", grouped=False),
)
_BLOOM_NORM = "transformer.word_embeddings_layernorm"
_BLOOM = Family(
    "transformer.h",
    _outer("transformer.word_embeddings", "transformer.ln_f", layernorm_embedding=_BLOOM_NORM),
    _inner(
        *("input_layernorm", "self_attention.dense", "post_attention_layernorm"),
        *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    _grouped_qkv,
)
_FALCON_NORMS = {
    "shared_layer_norm": "input_layernorm",
    "input_layer_norm": "ln_attn",
    "post_attention_layer_norm": "ln_mlp",
}

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    "gemma": _LLAMA,
    "gemma3_text": replace(_LLAMA, parts=_GEMMA3_PARTS),
    **dict.fromkeys(GEMMA4, replace(_LLAMA, parts=_GEMMA4_PARTS, unfuse=_gemma4_qkv)),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(_GPT2, conv1d=False),
    "gptj": Family("transformer.h", _GPT_OUTER, _GPTJ_PARTS, _gptj_qkv),
    "opt": _OPT,
    "bloom": _BLOOM,
    "falcon": replace(_BLOOM, parts=_BLOOM.parts | _FALCON_NORMS),
}

# Reasons to refuse an architecture. FAMILIES has the exact ones.
NO_LOADER = "CTranslate2's converter has no loader for it"
RENAMED = "CTranslate2's converter reads configuration fields that transformers 5 renamed"
UNPROVEN = "it was not measured whether CTranslate2 computes it exactly"
REFUSED = {
    **dict.fromkeys(("codegen", "gemma4", "gemma4_unified"), UNPROVEN),
    "gemma2": "CTranslate2 leaves out its soft-capping, so every answer would be a little wrong",
    "phi": RENAMED,
    "phi3": RENAMED,
    "gpt_neox": RENAMED,
}

EXACT_ROPE = ("default", "linear")
GEMMA_ROPE_THETA = 10_000.0
# Settings of Gemma 3 that the converter assumes: it does not find them in a configuration of transformers 5.
GEMMA3_ROPE_THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}
# Settings of Gemma 4 that CTranslate2 assumes. It has no per-layer embeddings, shared keys or experts.
GEMMA4_FIXED = {
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": False, "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
}  # fmt: skip
HEAD_DIM_NOT_EXPORTED = ("llama", "qwen2")
SILU_ONLY = ("llama", "mistral", "qwen2", "qwen3")
# A window shorter than the text is an error in CTranslate2, or ignored; windows below this would break ordinary use.
SHORTEST_WINDOW = 2048


def reason_of(kind: str) -> str:
    """Return why a model type that is not in `FAMILIES` is refused."""
    return REFUSED.get(kind, NO_LOADER)


def refusal_of_config(config: Mapping[str, Any]) -> str | None:
    """Return why a raw config.json, without transformers' defaults, is refused, or None."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        return reason_of(str(kind))
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    if not isinstance(window, int) or not isinstance(longest, int):
        return None
    unused = str(kind).startswith("qwen") and config.get("use_sliding_window") is not True
    return None if unused else _short_window(window, longest)


def refusal(settings: Any) -> str | None:
    """Return why CTranslate2 would not compute a model of this configuration exactly, or None."""
    kind = settings.model_type
    if kind not in FAMILIES:
        return reason_of(kind)
    if kind == "gemma3_text":
        return _gemma3_refusal(settings)
    if kind in GEMMA4:
        return _gemma4_refusal(settings)
    rope = getattr(settings, "rope_parameters", None) or {}
    if (rope_type := rope.get("rope_type", "default")) not in EXACT_ROPE:
        why = "not exported in full, so answers would be silently wrong" if rope_type == "llama3" else "not proven"
        return f"its rope scaling {rope_type!r} is {why}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"partial_rotary_factor {rope['partial_rotary_factor']} is not exported"
    if kind in SILU_ONLY and settings.hidden_act != "silu":
        return f"CTranslate2 computes silu, but config.json asks for {settings.hidden_act!r}"
    head_dim = getattr(settings, "head_dim", None)
    if kind in HEAD_DIM_NOT_EXPORTED and head_dim and head_dim * settings.num_attention_heads != settings.hidden_size:
        return f"CTranslate2 does not export head_dim {head_dim}, which is not hidden_size / num_attention_heads"
    if kind == "gemma":
        for name, value, fixed in (
            ("rope_theta", float(rope.get("rope_theta", GEMMA_ROPE_THETA)), GEMMA_ROPE_THETA),
            ("hidden_act", settings.hidden_act, "gelu_pytorch_tanh"),
            ("attention_bias", settings.attention_bias, False),
        ):
            if value != fixed:
                return f"CTranslate2 exports {name} {fixed} for Gemma, but config.json has {value}"
    if kind == "falcon" and settings.new_decoder_architecture and settings.multi_query:
        return "CTranslate2's converter takes Falcon's new architecture only with multi_query false"
    return _window_refusal(settings)


def _window_refusal(settings: Any) -> str | None:
    window = getattr(settings, "sliding_window", None)
    if not window:
        return None
    used = settings.model_type.startswith("qwen") and getattr(settings, "use_sliding_window", False)
    short = _short_window(window, settings.max_position_embeddings)
    return short or ("CTranslate2 ignores its sliding window" if used else None)


def _short_window(window: int, longest: int) -> str | None:
    short = 0 < window < min(SHORTEST_WINDOW, longest)
    advice = f"for shorter texts, set max_position_embeddings to {window} in config.json"
    wrong = f"CTranslate2 fails or errs on texts longer than its sliding window of {window} tokens; {advice}"
    return wrong if short else None


def _gemma3_refusal(settings: Any) -> str | None:
    for layer_type, theta in GEMMA3_ROPE_THETA.items():
        rope = settings.rope_parameters.get(layer_type) or {}
        if rope.get("rope_type", "default") != "default" or float(rope.get("rope_theta", theta)) != theta:
            return f"CTranslate2 exports no rope settings of Gemma 3 but rope_theta {theta:g} for {layer_type}"
    if settings.query_pre_attn_scalar != settings.head_dim:
        return f"CTranslate2 ignores query_pre_attn_scalar {settings.query_pre_attn_scalar}"
    return _window_refusal(settings)


def _gemma4_refusal(settings: Any) -> str | None:
    for name, fixed in GEMMA4_FIXED.items():
        if (value := getattr(settings, name, None) or fixed) != fixed:
            return f"CTranslate2 computes Gemma 4 with {name} {fixed}, but config.json has {value}"
    for kind, known in ((FULL, "proportional"), (SLIDING, "default")):
        rope = settings.rope_parameters.get(kind) or {}
        if rope.get("rope_type") != known or rope.get("factor", 1.0) != 1.0:
            return f"CTranslate2 computes Gemma 4 with plain {known} rope for {kind}, but config.json has {shown(rope)}"
    try:
        readable(settings)
    except ValueError:
        return "CTranslate2's converter needs blocks of full and of sliding attention, and alike blocks of each kind"
    return _window_refusal(settings)


class SourceTensors:
    """Float32 weights of a CTranslate2 model under the source's names and shapes; a tied output layer is left out.

    Raises UnsupportedError for an unknown architecture, ArtifactError for an unexpected variable.
    """

    def __init__(self, model: Ct2Model, config: Any) -> None:
        family = FAMILIES.get(config.model_type)
        if family is None:
            raise UnsupportedError(
                f"quantkit cannot read the architecture {config.model_type!r} back from CTranslate2's files. "
                f"It reads: {', '.join(FAMILIES)}."
            )
        self._model, self._family, self._config = model, family, config
        self._variables: dict[str, str] = {}
        self._plain: set[str] = set()  # tensors that are alone in their variable, with unchanged rows
        self._opened: tuple[str, dict[str, np.ndarray]] = ("", {})
        for variable in sorted([*model.variables, *model.aliases]):
            shape = model.shape(variable)
            scalar = not shape and not variable.endswith(SCALAR)
            if not variable.startswith("decoder/") or scalar or variable.endswith("_scale"):
                continue  # settings (numbers of heads, rotary base, ...) and scales of codes
            if variable == "decoder/projection/weight" and config.tie_word_embeddings:
                continue
            # The tensors in a variable do not depend on its columns, so one column is enough to find them.
            one_column = np.zeros((*shape[:1], *(1 for _ in shape[1:])), np.float32)
            for name, part in self._tensors_in(variable, one_column).items():
                if name in self._variables:
                    other = self._variables[name]
                    raise ArtifactError(f"{model.path}: the variables {other} and {variable} both hold {name}")
                self._variables[name] = variable
                if part is one_column:
                    self._plain.add(name)

    def names(self) -> list[str]:
        return list(self._variables)

    def types(self) -> Mapping[str, int]:
        return self._model.types()

    def read(self, name: str) -> Rows:
        variable = self._variables.get(name)
        if variable is None:
            raise ArtifactError(f"{self._model.path} lacks the tensor {name}. {AGAIN}")
        if name in self._plain:
            return Rows(self._model.shape(variable), partial(self._model.values, variable))
        if self._opened[0] != variable:  # a fused variable is read several times in a row
            self._opened = ("", {})  # never hold two of them
            self._opened = (variable, self._tensors_in(variable, self._model.values(variable)))
        return rows_of_array(self._opened[1][name])

    def _tensors_in(self, variable: str, values: np.ndarray) -> dict[str, np.ndarray]:
        family, (scope, _, leaf) = self._family, variable.rpartition("/")
        layer = LAYER.fullmatch(scope)
        prefix, part = ("", scope) if layer is None else (f"{family.layers}.{layer[1]}.", layer[2])
        names = family.whole if layer is None else family.parts
        if self._config.model_type == "opt" and scope == "decoder/position_encodings":
            # The converter drops the rows before position 0, which no unpadded text uses.
            values = np.concatenate([np.zeros_like(values[:OPT_POSITION_OFFSET]), values])
        block, what = -1 if layer is None else int(layer[1]), f"{self._model.path}: the variable {variable}"
        with reraise_as(f"{what} does not fit the source's numbers of blocks and heads", ArtifactError, AGAIN):
            if variable.endswith(SCALAR):
                return {f"{family.layers}.{scope.rpartition('_')[2]}.{leaf}": values.reshape(1)}
            if part == "self_attention/linear_0" and leaf in LEAVES:
                modules = family.unfuse(values, self._config, block)
            elif part not in names or leaf not in LEAVES:
                raise ArtifactError(f"{what} has no place in the architecture")
            elif names is _GEMMA4_PARTS and part.endswith(("/q_norm", "/k_norm")):
                modules = {names[part]: _gemma4_rows(values, self._config, block)}
            else:
                modules = {names[part]: values} if names[part] else {}
        turned = family.conv1d and layer is not None
        return {
            f"{prefix}{module}.{LEAVES[leaf]}": np.ascontiguousarray(rows.T if turned else rows)
            for module, rows in modules.items()
        }
