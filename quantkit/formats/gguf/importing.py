"""A GGUF file as a Hugging Face checkpoint: every tensor dequantized by ggml, in transformers' names and row order.

config.json is what transformers reads from the file's keys, with what it leaves out, or one that is given; it has to
mean what the file says (proof.py). The tokenizer is what transformers rebuilds from the file.
It does not always split text as the source's did, so it is held against llama.cpp's ids; where they differ, the
source's own tokenizer has to be given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.rows import Rows
from quantkit.checkpoints.safetensors import TensorInfo
from quantkit.checkpoints.side_files import copy_side_files
from quantkit.checkpoints.writer import CheckpointWriter
from quantkit.conversion.staging import refuse_existing, staged
from quantkit.data.texts import sample_text
from quantkit.errors import ArtifactError, DependencyError, RecipeError, SourceError, UnsupportedError, first_line
from quantkit.formats.float.checkpoint import Checkpoint
from quantkit.formats.gguf.architectures.known import KNOWN
from quantkit.formats.gguf.config_check import own_keys, refuse_other_meaning
from quantkit.formats.gguf.reader import headers_of, read_file, rope_divisors
from quantkit.formats.gguf.tokenizer.pretokenizers import PROBE
from quantkit.models.config import load_tokenizer
from quantkit.progress import Progress
from quantkit.system.files import sha256_of

# Settings that transformers leaves out for some architectures. llama.cpp scales queries by the head's size.
LEFT_OUT = {
    "head_dim": "attention.key_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_positions": "context_length",
    "query_pre_attn_scalar": "attention.key_length",
}
GIVE_CONFIG = "Give the source's config.json with --config."
SPACES = "a  1  22   333\t4\n\n 5  b  \n  c   d"
PIECE = 1 << 20  # values that are in memory at a time
SAMPLE = 20_000  # characters of the bundled articles
SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # the file's names and transformers'
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def import_gguf(
    path: Path,
    out: Path,
    *,
    dtype: str = "float16",
    tokenizer: Path | None = None,
    config: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the model in the GGUF file `path` (of a split one the first file) as a checkpoint folder; return `out`.

    float32 holds the file's values exactly, float16 rounds them. `tokenizer` is a folder with the tokenizer to take
    instead of the file's, `config` a config.json. Raises ArtifactError for a file that cannot be read, UnsupportedError
    where the configuration means something else than the file says, where its tokenizer comes out otherwise than
    llama.cpp's, or for values beyond `dtype`.
    """
    if dtype not in DTYPES:
        raise RecipeError(f"unknown dtype {dtype!r}. Known: {', '.join(DTYPES)}.")
    refuse_existing(out, force)
    keys = headers_of(path)[0].keys
    shapes = {name: rows.shape for name, rows in read_file(path)}
    if tokenizer is not None:
        load_tokenizer(tokenizer)
    said = progress or Progress()
    settings = _given(config) if config is not None else _from_keys(path, keys, shapes)
    # A file with a head of its own may have rounded it otherwise than the embedding.
    head = KNOWN[settings["model_type"]].head if settings["model_type"] in KNOWN else ""
    settings["tie_word_embeddings"] = head not in shapes
    _refuse_other_meaning(path, settings, keys, shapes)
    settings["dtype"] = dtype
    work = {"config": settings, "import": str(path), "sha256": sha256_of(path), "dtype": dtype}
    with staged(out, force, work, said.say) as folder:
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        if tokenizer is None:
            _write_tokenizer(path, folder, keys)
        else:
            copy_side_files(tokenizer, folder)
        writer = CheckpointWriter(folder)
        try:
            with said.step("dequantizing", sum(map(prod, shapes.values()))) as advance:
                for name, rows in read_file(path):
                    writer.add_pieces(name, DTYPES[dtype], rows.shape, _rounded(path, name, rows, DTYPES[dtype]))
                    advance(rows.elements)
            writer.finish()
        finally:
            writer.close()
    return out


def _rounded(path: Path, name: str, rows: Rows, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for _, piece in rows.pieces(PIECE):
        small = torch.from_numpy(piece).to(dtype)
        if not bool(torch.isfinite(small).all()):
            raise UnsupportedError(f"{path}: {name} has values beyond {str(dtype)[6:]}. Use --dtype float32.")
        yield small


def _given(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"config: {path} cannot be read as a config.json: {first_line(error)}.") from None
    if not isinstance(found, dict) or "model_type" not in found:
        raise RecipeError(f"config: {path} names no model_type. Give the config.json of the source.")
    return {key: value for key, value in found.items() if key not in ("quantization_config", "torch_dtype")}


def _from_keys(path: Path, keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What transformers reads from the file's keys, and what only its tensors tell."""
    from transformers import AutoConfig

    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    except (ValueError, KeyError, OSError, TypeError, AttributeError, NotImplementedError) as error:
        raise ArtifactError(
            f"{path}: transformers cannot read its keys as a config.json: {first_line(error)}. {GIVE_CONFIG}"
        ) from None
    own = own_keys(keys)
    config = {key: value for key, value in config.items() if not key.endswith("name_or_path")}
    for setting, part in (("attention_bias", "self_attn.q_proj.bias"), ("mlp_bias", "mlp.up_proj.bias")):
        if setting in config:
            config[setting] = any(name.endswith(part) for name in shapes)
    if keys["general.architecture"] == "llama" and own.get("expert_count"):
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        config |= {"num_local_experts": own["expert_count"], "num_experts_per_tok": own.get("expert_used_count")}
    return config | {setting: own[key] for setting, key in LEFT_OUT.items() if setting in config and key in own}


def _refuse_other_meaning(
    path: Path, config: dict[str, Any], keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    tensors = {name: TensorInfo("", "F32", shape, 0, 4 * prod(shape)) for name, shape in shapes.items()}
    try:
        refuse_other_meaning(Checkpoint(path.parent, path.name, None, config, tensors), keys, rope_divisors(path))
    except (SourceError, UnsupportedError) as error:
        raise UnsupportedError(
            f"{path} as a checkpoint would compute something else: {str(error).rstrip('.')}. {GIVE_CONFIG}"
        ) from None


def _write_tokenizer(path: Path, folder: Path, keys: dict[str, Any]) -> None:
    """Save the tokenizer that transformers rebuilds from the file, if it gives llama.cpp's ids."""
    from transformers import AutoTokenizer

    fix = "Give the folder of the source's tokenizer with --tokenizer."
    if find_spec("llama_cpp") is None:
        raise DependencyError(f"the tokenizer in {path} is proven by llama-cpp-python, which is missing. {fix}")
    try:
        rebuilt = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, OSError, TypeError, AttributeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"{path}: transformers cannot rebuild its tokenizer: {first_line(error)}. {fix}"
        ) from None
    text = PROBE + SPACES + sample_text("calibration").content[:SAMPLE]
    if rebuilt(text, add_special_tokens=False)["input_ids"] != _ids_of_llama_cpp(path, text):
        raise UnsupportedError(
            f"{path}: the tokenizer that transformers rebuilds from it gives other ids than llama.cpp. {fix}"
        )
    for key, name in SPECIAL.items():
        if (number := keys.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            setattr(rebuilt, f"{name}_token", rebuilt.convert_ids_to_tokens(int(number)))
    rebuilt.save_pretrained(folder)


def _ids_of_llama_cpp(path: Path, text: str) -> list[int]:
    import llama_cpp

    model = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
    ids: list[int] = model.tokenize(text.encode(), add_bos=False, special=False)
    return ids
