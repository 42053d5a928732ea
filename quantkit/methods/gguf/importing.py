"""A GGUF file as a Hugging Face checkpoint: every tensor dequantized by ggml, in transformers' names and row order.

config.json is what transformers reads from the file's keys. The tokenizer is what transformers rebuilds from the file.
It does not always split text as the source's did, so it is held against llama.cpp's ids; where they differ, the
source's own tokenizer has to be given.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from quantkit.core.checkpoint import CheckpointWriter
from quantkit.core.rows import Rows
from quantkit.digest import sha256_of
from quantkit.errors import ArtifactError, DependencyError, RecipeError, UnsupportedError, first_line
from quantkit.methods.gguf.contents import contents_of
from quantkit.methods.gguf.pretokenizers import PROBE
from quantkit.methods.gguf.reader import read_file
from quantkit.progress import Progress
from quantkit.source import SIDE_FILES, load_tokenizer
from quantkit.staging import refuse_existing, staged
from quantkit.text import sample_text

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
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the model in the GGUF file `path` (of a split one the first file) as a checkpoint folder; return `out`.

    float32 holds the file's values exactly, float16 rounds them. `tokenizer` is a folder with the tokenizer to take
    instead of the file's. Raises ArtifactError for a file that cannot be read, UnsupportedError where its tokenizer
    comes out otherwise than llama.cpp's, or for values beyond `dtype`.
    """
    if dtype not in DTYPES:
        raise RecipeError(f"unknown dtype {dtype!r}. Known: {', '.join(DTYPES)}.")
    refuse_existing(out, force)
    contents = contents_of(path)
    if tokenizer is not None:
        load_tokenizer(tokenizer)
    said = progress or Progress()
    work = {"import": str(path), "sha256": sha256_of(path), "dtype": dtype}
    with staged(out, force, work, said.say) as folder:
        _write_config(path, folder, dtype)
        if tokenizer is None:
            _write_tokenizer(path, folder, contents.keys)
        else:
            for name in SIDE_FILES:
                if (tokenizer / name).is_file():
                    shutil.copyfile(tokenizer / name, folder / name)
        writer = CheckpointWriter(folder)
        try:
            with said.step("dequantizing", sum(tensor.weights for tensor in contents.tensors)) as advance:
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


def _write_config(path: Path, folder: Path, dtype: str) -> None:
    from transformers import AutoConfig

    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise ArtifactError(
            f"{path}: transformers cannot read its keys as a config.json: {first_line(error)}"
        ) from None
    config = {key: value for key, value in config.items() if not key.endswith("name_or_path")}
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
