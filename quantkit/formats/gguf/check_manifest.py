"""Check a GGUF artifact against its recipe and the source's config.json, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.checkpoints.safetensors import TensorInfo
from quantkit.errors import ArtifactError, SourceError, UnsupportedError
from quantkit.formats.float import Checkpoint
from quantkit.formats.gguf.header import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT16, UINT32, Header
from quantkit.formats.gguf.hyperparameters import find_architecture, read_shape
from quantkit.formats.gguf.plan import make_plan
from quantkit.formats.gguf.reader import headers_of
from quantkit.formats.gguf.tokenizer.vocabulary import KEYS, SUPPRESSED, read_vocabulary
from quantkit.records.artifact import Artifact
from quantkit.system.untrusted import shown

ANY_TYPE = "F16"  # of a plan that is only used for its list of tensors
ROWS = ".vocab_size"
GROUPED = {"Q4_0": "4", "Q8_0": "8", "MXFP4_MOE": "mxfp4"}  # bits of methods that make codes
CHOSEN = "auto"  # bits of a file with chosen types; its file type is the mix of its main type


# Value types that llama.cpp requires for keys; a list also has its items' type.
KINDS = {
    **dict.fromkeys(("general.architecture", "general.type", "general.name", "general.size_label"), (STRING,)),
    **dict.fromkeys(("general.file_type", "general.quantization_version", "general.alignment"), (UINT32,)),
    **dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"), (STRING,)),
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"), (ARRAY, STRING)),
    "tokenizer.ggml.scores": (ARRAY, FLOAT32),
    **dict.fromkeys(("tokenizer.ggml.token_type", SUPPRESSED), (ARRAY, INT32)),
    **dict.fromkeys(("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"), (BOOL,)),
    **dict.fromkeys(("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces"), (BOOL,)),
    **dict.fromkeys(("split.no", "split.count"), (UINT16,)),
    "split.tensors.count": (INT32,),
}
NEEDED = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.tokens")


def _as_source(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], folder: Path | None = None) -> Checkpoint:
    """Return a Source with these tensor shapes but no values, enough to plan a GGUF file."""
    tensors = {name: TensorInfo("", "F32", shape, 0, 4 * prod(shape)) for name, shape in shapes.items()}
    return Checkpoint(folder or Path(), "the file", None, config, tensors)


@contextmanager
def _of_its_config() -> Iterator[None]:
    try:
        yield
    except (SourceError, UnsupportedError) as error:
        raise ArtifactError(f"the file does not match its source's config.json: {error}") from None


def refuse_tensors(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ArtifactError if the file's tensors are not those of a model with this config.json."""
    with _of_its_config():
        make_plan(_as_source(config, shapes), ANY_TYPE)


def _refuse_keys(config: dict[str, Any], headers: list[Header]) -> None:
    """Raise ArtifactError if the file's architecture keys differ from what quantkit derives from config.json."""
    header, tensors = headers[0], [tensor for each in headers for tensor in each.tensors]
    with _of_its_config():
        source = _as_source(config, {tensor.name: tensor.shape for tensor in tensors})
        name, shape = find_architecture(source).name, read_shape(source)
    written = {f"{name}.{key}": value for key, value in shape.keys.items()}
    found = {key: value for key, value in header.keys.items() if key.startswith(f"{name}.") and key != f"{name}{ROWS}"}
    for key in (*written, *found):
        one, other = found.get(key), written.get(key)
        floats = isinstance(one, float) and header.kinds[key] != (FLOAT32,)
        if key in header.unusual or floats or not _same(one, other):
            raise ArtifactError(
                f"{header.path}: the key {key} is {shown(one)}, but its source's config.json gives {shown(other)}"
            )
    rows = [tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight"]
    if rows and header.keys.get(f"{name}{ROWS}", rows[0]) != rows[0]:
        raise ArtifactError(
            f"{header.path}: the key {name}{ROWS} differs from the {rows[0]:,} rows of token_embd.weight. "
            "Convert again with --force."
        )


def _refuse_tokenizer(artifact: Artifact, header: Header) -> None:
    """Raise ArtifactError if the tokenizer in the GGUF file differs from the tokenizer files in its folder."""
    tokens = header.keys["tokenizer.ggml.tokens"]
    try:
        source = _as_source(dict(artifact.manifest.source.config), {}, artifact.folder)
        written = read_vocabulary(source, len(tokens) if isinstance(tokens, list) else 0).keys
    except (SourceError, UnsupportedError, ValueError) as error:
        raise ArtifactError(f"{header.path} cannot be compared with the tokenizer next to it: {error}") from None
    found = {key: value for key, value in header.keys.items() if key.startswith(KEYS)}
    for key in (*written, *found):
        if key not in found or key not in written or not _same(found[key], written[key]):
            raise ArtifactError(f"{header.path}: the key {key} is not what the tokenizer in {artifact.folder} gives")


def _refuse_kinds(header: Header) -> None:
    """Raise ArtifactError for missing keys, or values of a type that llama.cpp rejects."""
    for key in NEEDED:
        if key not in header.keys:
            raise ArtifactError(f"{header.path} lacks the key {key}")
    for key, kind in header.kinds.items():
        wanted = (UINT32,) if key.startswith("tokenizer.ggml.") and key.endswith("_token_id") else KINDS.get(key, kind)
        if kind != wanted:
            raise ArtifactError(
                f"{header.path}: the key {key} ({shown(header.keys[key])}) has the value type {kind}, and programs "
                f"expect {wanted}"
            )


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return bool(np.float32(one) == np.float32(other))
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


def recorded_options(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    """Return the recipe options that the keys record, with possible values; raise ArtifactError for a mismatch."""
    import gguf

    headers = headers_of(artifact.folder / artifact.manifest.weight_files[0])
    _refuse_kinds(headers[0])
    _refuse_tokenizer(artifact, headers[0])
    if any(header.tensors for header in headers):  # else it is a vocabulary
        _refuse_keys(artifact.manifest.source.config, headers)
    number = headers[0].keys.get("general.file_type")
    names = {kind.value: kind.name.removeprefix("MOSTLY_").replace("ALL_F32", "F32") for kind in gguf.LlamaFileType}
    name = names.get(number) if isinstance(number, int) else None
    return {
        "bits": tuple(bits for bits in (name, GROUPED.get(str(name)), CHOSEN) if bits is not None),
        "vocab_only": (not any(header.tensors for header in headers),),
    }
