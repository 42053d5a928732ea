"""The text half of a multimodal checkpoint: tensor names and config.json of its language model.

A config.json with a `text_config` describes a causal language model with image or audio towers. quantkit quantizes and
evaluates only the language model and copies all other tensors. An artifact has the names and the
config.json of the whole model. Published names: transformers/conversion_mapping.py and the models' own files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import UnsupportedError
from quantkit.models.config import open_config
from quantkit.system.untrusted import reraise_as, shown

TEXT = "text_config"
BASE, HEAD = "model.", "lm_head."  # prefixes of a causal language model's names
NESTED = "model.language_model."  # prefix of the text half's modules in transformers
# Prefixes of its decoder and of its output layer in published checkpoints; the first that a checkpoint has is used.
PREFIXES = (
    ("language_model.model.", "language_model.lm_head."),  # llava, gemma3, mistral3, llama4, internvl
    (NESTED, HEAD),  # qwen3_vl, qwen3_5, and files saved by transformers 4.52
    ("model.text_model.", HEAD),  # idefics3, smolvlm
    ("language_model.", HEAD),
    (BASE, HEAD),  # qwen2_vl, qwen2_5_vl
)
# Settings of the whole model that apply to the text half if it lacks them.
INHERITED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "auto_map")
# Causal models for text halves without one of their own: text positions are equal in all of mrope's dimensions.
SAME_AS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2"}
SAME_AS |= {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
# Multimodal models whose published config.json mixes the text half's settings with its own.
FLAT = ("qwen2_vl", "qwen2_5_vl")
# Settings that are read from config.json without transformers' defaults.
STATED = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")


@dataclass(frozen=True)
class TextPrefixes:
    """Prefixes of the language model's decoder and output layer in published tensor names."""

    base: str
    head: str

    def text(self, name: str) -> str | None:
        """Map a published tensor name to its name in the language model alone; None for a tensor outside it."""
        for published, own in ((self.base, BASE), (self.head, HEAD)):
            if name.startswith(published):
                return own + name.removeprefix(published)
        return None

    def published(self, name: str) -> str:
        """Inverse of `text`, also for module names and parts of quantized layers."""
        return _replaced(name, ((BASE, self.base), (HEAD, self.head)))

    def modules(self, name: str) -> tuple[str, ...]:
        """Return a language model module's names in published checkpoints and in transformers."""
        nested = NESTED + name.removeprefix(BASE) if name.startswith(BASE) else name
        return tuple(sorted({self.published(name), nested}))

    def alone(self, module: str) -> str:
        """Inverse of `modules`; modules outside the language model keep their names."""
        return _replaced(module, ((NESTED, BASE), (self.base, BASE), (self.head, HEAD)))


def _replaced(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """Replace the first matching prefix; a name that equals a prefix without its dot also matches."""
    for old, new in prefixes:
        if name.startswith(old) or name == old[:-1]:
            return f"{new}{name[len(old) :]}".rstrip(".")
    return name


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Return whether config.json belongs to a multimodal model."""
    return isinstance(config.get(TEXT), dict) or config.get("model_type") in FLAT


def with_text(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change text settings in a multimodal config.json; `tie_word_embeddings` is also set at the top level."""
    tied = {key: value for key, value in changes.items() if key == "tie_word_embeddings"}
    if isinstance(inner := config.get(TEXT), dict):
        return {**config, TEXT: {**inner, **changes}, **tied}
    return {**config, **changes}


def prefixes_of(config: Mapping[str, Any], names: Collection[str]) -> TextPrefixes | None:
    """Return the language model's prefixes, None for a text-only model; raise UnsupportedError if unknown."""
    if not is_multimodal(config):
        return None
    for base, head in PREFIXES:
        if any(name.startswith(base) for name in names):
            return TextPrefixes(base, head)
    known = ", ".join(f"{base}*" for base, _ in PREFIXES)
    raise UnsupportedError(
        f"config.json is of a multimodal model ({shown(config.get('model_type'))}), but no tensor has a prefix of its "
        f"text half ({known}): there is {shown(min(names))}. Give a checkpoint as transformers saves it."
    )


def stated_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a multimodal config.json's text settings in the form of a causal model's config.json."""
    own: dict[str, Any] = {key: config[key] for key in INHERITED if key in config}
    if isinstance(inner := config.get(TEXT), dict):
        own |= inner
    else:
        own |= {key: value for key, value in config.items() if not isinstance(value, dict) or key.startswith("rope_")}
        own |= {"architectures": None, "model_type": f"{config['model_type']}_text"}
    if (kind := own.get("model_type")) in SAME_AS:
        own["model_type"] = SAME_AS[str(kind)]
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := own.get(key), dict):
                plain = {name: value for name, value in rope.items() if not name.startswith("mrope")}
                types = {name: "default" for name in ("rope_type", "type") if plain.get(name) == "mrope"}
                own[key] = plain | types
    return own


def config_of(config: Mapping[str, Any], prefixes: TextPrefixes, names: Iterable[str]) -> dict[str, Any]:
    """Return the config.json of the language model alone, from the whole config and the published tensor names.

    The output layer is tied if it has no tensor. Defaults that differ between the whole model and the language model
    alone are written out. Raises UnsupportedError.
    """
    own = stated_of(config)
    own["tie_word_embeddings"] = not any(name.startswith(prefixes.head) for name in names)
    what = f"the text half of {shown(config.get('model_type'))} is unknown to transformers"
    with reraise_as(what, UnsupportedError):
        whole = open_config(dict(config)).get_text_config().to_dict()
        kind = str(whole.get("model_type"))
        own.setdefault("model_type", SAME_AS.get(kind, kind))
        alone = open_config(own).to_dict()
    inside = {name: whole[name] for name in STATED if name in whole}
    unstated = {name for name in whole.keys() & alone.keys() - own.keys() if not name.startswith(("_", "transformers"))}
    return inside | own | {name: value for name, value in whole.items() if name in unstated and alone[name] != value}


def roots(outside: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Return the outermost modules that hold tensors of `outside` and none of `names`, sorted; published names."""
    others = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    found = set()
    for name in outside:
        parts = name.split(".")
        outer = (".".join(parts[:count]) for count in range(1, len(parts)))
        if (root := next((path for path in outer if path not in others), None)) is not None:
            found.add(root)
    return tuple(sorted(found))
