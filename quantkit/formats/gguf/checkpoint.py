"""Open a GGUF file as a source: tensors dequantized by ggml, with transformers' names and row order.

transformers does not read all GGUF keys, so the imported model could have a wrong RoPE or lack biases. Two checks
prevent this: the imported model must map back to the same GGUF keys, and the tokenizer that transformers rebuilds
must give the same ids as llama.cpp. If the tokenizer fails, the user must supply the original one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.rows import Rows
from quantkit.checkpoints.safetensors import TensorInfo
from quantkit.checkpoints.side_files import copy_side_files
from quantkit.data.texts import sample_text
from quantkit.errors import ArtifactError, DependencyError, RecipeError, SourceError, UnsupportedError
from quantkit.formats.gguf.architectures.known import KNOWN
from quantkit.formats.gguf.plan import IGNORED, make_plan
from quantkit.formats.gguf.prepared import ROWS, TABLE
from quantkit.formats.gguf.reader import headers_of, read_file, rope_divisors
from quantkit.formats.gguf.shapes import EXPERTS, KEY_HEADS, KEY_LENGTH, ROTATED, VALUE_LENGTH
from quantkit.formats.gguf.tokenizer.llama_cpp_ids import llama_cpp_ids
from quantkit.formats.gguf.tokenizer.pretokenizers import PROBE
from quantkit.models.config import load_tokenizer
from quantkit.models.skeleton import open_skeleton, refuse_shapes, source_name
from quantkit.models.source import Source
from quantkit.system.files import temporary_folder
from quantkit.system.untrusted import read_object, reraise_as, shown

# Settings that transformers does not read for some architectures. llama.cpp scales queries by the head's size.
LEFT_OUT = {
    "head_dim": "attention.key_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_positions": "context_length",
    "query_pre_attn_scalar": "attention.key_length",
}
GIVE_CONFIG = "Give the source's config.json with --config, an option of `quantkit import`."
SPACES = "a  1  22   333\t4\n\n 5  b  \n  c   d"
SAMPLE = 20_000  # characters of the bundled articles
FLOAT_TYPES = {"F32", "F16", "BF16"}
# llama.cpp's defaults for missing keys.
SILENT: Mapping[str, Any] = {"rope.freq_base": 10000.0, "rope.freq_base_swa": 10000.0, "attention.sliding_window": 0}
# Keys that do not affect the computation, or repeat other keys.
IDLE = ("vocab_size", "rope.scaling.finetuned")
CLOSE = 1e-6  # relative; files hold float32
SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # the file's names and transformers'


class GgufCheckpoint(Source):
    """A GGUF file as a source of float32 tensors; `path` is the first file of a split model.

    `tokenizer_folder` and `config` override the file's. Raises ArtifactError, or UnsupportedError (other results).
    """

    format = "gguf"

    def __init__(self, path: Path, tokenizer_folder: Path | None = None, config: Path | None = None) -> None:
        self.path, self.folder, self.model = path, path.parent, str(path)
        self._headers = headers_of(path)
        self._rows: dict[str, Rows] = dict(read_file(path))
        self._tokenizer_folder = tokenizer_folder
        keys = self._headers[0].keys
        shapes = {name: rows.shape for name, rows in self._rows.items()}
        self.tensors = {
            name: TensorInfo(path.name, "F32", shape, 0, 4 * math.prod(shape)) for name, shape in shapes.items()
        }
        self.config = _given(config) if config is not None else _from_keys(path, keys, shapes)
        # A separate head in the file may be rounded differently from the embedding.
        row = KNOWN.get(self.config["model_type"])
        self.config["tie_word_embeddings"] = (row.head if row else "") not in shapes
        self.config |= row.multiplied if row else {}  # they are multiplied into a file's weights
        self.config |= {ROWS: shapes[TABLE][0]} if TABLE in shapes else {}  # the vocabulary size is the table's rows
        self.whole_config = self.config
        try:
            with reraise_as(f"{path} cannot be read as a checkpoint", ArtifactError, GIVE_CONFIG):
                _refuse_other_meaning(self, keys, rope_divisors(path))
        except (SourceError, UnsupportedError) as error:
            raise UnsupportedError(
                f"{path} would compute something else as a checkpoint: {str(error).rstrip('.')}. {GIVE_CONFIG}"
            ) from None
        self.tokenizer()  # refuses an unusable tokenizer

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def weight_files(self) -> list[str]:
        return [header.path.name for header in self._headers]

    hashed_files = weight_files

    @property
    def quantization(self) -> str | None:
        kinds = sorted({tensor.type for header in self._headers for tensor in header.tensors} - FLOAT_TYPES)
        return f"gguf, {', '.join(kinds)}" if kinds else None

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        self.info(name)
        return np.ascontiguousarray(self._rows[name].read(start, stop)).reshape(-1).view(np.uint8)

    def copy_side_files(self, folder: Path) -> None:
        if self._tokenizer_folder is not None:
            copy_side_files(self._tokenizer_folder, folder)
        else:
            self._rebuilt_tokenizer.save_pretrained(folder)

    def tokenizer(self) -> Any:
        return load_tokenizer(self._tokenizer_folder) if self._tokenizer_folder else self._rebuilt_tokenizer

    @cached_property
    def _rebuilt_tokenizer(self) -> Any:
        return _rebuild_tokenizer(self.path, self._headers[0].keys)


def _given(path: Path) -> dict[str, Any]:
    fix = "Give the config.json of the source."
    values = read_object(path, RecipeError, fix)
    if not isinstance(values.get("model_type"), str):
        raise RecipeError(f"config: {path} names no model_type. {fix}")
    return {key: value for key, value in values.items() if key not in ("quantization_config", "torch_dtype")}


@contextmanager
def _keys_alone(path: Path, keys: Mapping[str, Any], tokenizer: bool) -> Iterator[Path]:
    """Yield a temporary GGUF file with these keys but no tensors, for transformers to read."""
    import gguf

    kinds = gguf.GGUFValueType
    of = {bool: kinds.BOOL, int: kinds.INT64, float: kinds.FLOAT64, str: kinds.STRING, list: kinds.ARRAY}
    with temporary_folder() as folder:
        alone = folder / path.name
        writer = gguf.GGUFWriter(alone, keys["general.architecture"])
        for key, value in keys.items():
            if key == "general.architecture" or (isinstance(value, list) and not (value and tokenizer)):
                continue
            inner = of[type(value[0])] if isinstance(value, list) else None
            writer.add_key_value(key, value, of[type(value)], inner)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        yield alone


def _from_keys(path: Path, keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the config.json that transformers derives from the keys, completed with settings inferred from tensors."""
    from transformers import AutoConfig

    with (
        reraise_as(f"{path}: transformers cannot read its keys as a config.json", ArtifactError, GIVE_CONFIG),
        _keys_alone(path, keys, tokenizer=False) as alone,
    ):
        settings = AutoConfig.from_pretrained(alone.parent, gguf_file=alone.name)
        config: dict[str, Any] = json.loads(settings.to_json_string(use_diff=False))
    own = _own_keys(keys)
    config = {key: value for key, value in config.items() if not key.endswith("name_or_path")}
    if isinstance(tokens := keys.get("tokenizer.ggml.tokens"), list):
        config["vocab_size"] = len(tokens)
    for setting, part in (("attention_bias", "self_attn.q_proj.bias"), ("mlp_bias", "mlp.up_proj.bias")):
        if setting in config:
            config[setting] = any(name.endswith(part) for name in shapes)
    if keys["general.architecture"] == "llama" and own.get("expert_count"):
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        config |= {"num_local_experts": own["expert_count"], "num_experts_per_tok": own.get("expert_used_count")}
    return config | {setting: own[key] for setting, key in LEFT_OUT.items() if setting in config and key in own}


def _rebuild_tokenizer(path: Path, keys: dict[str, Any]) -> Any:
    """Rebuild the tokenizer with transformers; raise UnsupportedError if its ids differ from llama.cpp's."""
    from transformers import AutoTokenizer

    fix = "Import it with `quantkit import --tokenizer FOLDER`, the source's tokenizer."
    if find_spec("llama_cpp") is None:
        raise DependencyError(f"checking the tokenizer in {path} needs llama-cpp-python, which is missing. {fix}")
    what = f"{path}: transformers cannot rebuild its tokenizer"
    text = PROBE + SPACES + sample_text("calibration").content[:SAMPLE]
    with reraise_as(what, UnsupportedError, fix), _keys_alone(path, keys, tokenizer=True) as alone:
        rebuilt = AutoTokenizer.from_pretrained(alone.parent, gguf_file=alone.name)
        ours = rebuilt(text, add_special_tokens=False)["input_ids"]
        for key, name in SPECIAL.items():
            if (number := keys.get(f"tokenizer.ggml.{key}_token_id")) is not None:
                if number not in range(len(rebuilt)):
                    raise UnsupportedError(f"{path}: its {key} token is {shown(number)} of {len(rebuilt)}. {fix}")
                setattr(rebuilt, f"{name}_token", rebuilt.convert_ids_to_tokens(number))
    if names := keys.get("tokenizer.chat_templates"):
        named = {name: keys.get(f"tokenizer.chat_template.{name}") for name in names}
        default = {"default": rebuilt.chat_template} if rebuilt.chat_template else {}
        rebuilt.chat_template = {name: text for name, text in named.items() if isinstance(text, str)} | default
    if ours != llama_cpp_ids(path, text):
        raise UnsupportedError(
            f"{path}: the tokenizer that transformers rebuilds from it gives other ids than llama.cpp. {fix}"
        )
    return rebuilt


def _own_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the file's architecture (such as ``llama.``), with that prefix removed."""
    prefix = f"{keys['general.architecture']}."
    return {key.removeprefix(prefix): value for key, value in keys.items() if key.startswith(prefix)}


def _refuse_other_meaning(source: Source, keys: Mapping[str, Any], factors: Mapping[str, Any]) -> None:
    """Raise UnsupportedError unless the imported model maps back to the file's keys and RoPE divisors."""
    plan = make_plan(source, "F32")
    name = plan.architecture.name
    if name != keys["general.architecture"]:
        raise UnsupportedError(f"its config.json has the architecture {name}")
    given, meant, heads = _own_keys(keys), plan.shape.keys, plan.shape.heads
    head = plan.shape.hidden // heads.query
    silent = {**SILENT, ROTATED: heads.size, KEY_HEADS: heads.query, KEY_LENGTH: head, VALUE_LENGTH: head, EXPERTS: 0}
    for key in sorted((meant.keys() | given.keys()) - set(IDLE)):
        says, means = given.get(key, silent.get(key)), meant.get(key, silent.get(key))
        if not _same(says, means):
            raise UnsupportedError(f"the file says {key} = {says}, its config.json means {means}")
    if factors.keys() != plan.shape.factors.keys() or not all(
        np.allclose(values, factors[k], rtol=CLOSE, atol=0) for k, values in plan.shape.factors.items()
    ):
        raise UnsupportedError("the file's rope factors differ from those of its config.json")
    skeleton = open_skeleton(source.config)
    refuse_shapes(source, skeleton)
    used = {source_name(source, skeleton, parameter) for parameter in skeleton.parameter_names()}
    if unused := [tensor for tensor in source.tensors if tensor not in used and not tensor.endswith(IGNORED)]:
        raise UnsupportedError(f"the file has a tensor for {unused[0]}, its config.json has none")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if {type(one), type(other)} <= {int, float}:
        return math.isclose(one, other, rel_tol=CLOSE)
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
