"""Vocabularies that a GGUF file cannot hold, or that llama.cpp cannot load, are refused before the work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_files import save_tokenizer
from tiny_llama import save_llama
from tiny_models import changed_copy

from quantkit.conversion.convert import convert
from quantkit.errors import SourceError, UnsupportedError


def put(*path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(data: dict[str, Any]) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = value

    return change


VOCABULARIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "equal ids": (put("model", "vocab", "ab", value=5), "'ab' and '<0x02>' both have the id 5|both have the id 5"),
    "padding that is there": (put("model", "vocab", "[PAD280]", value=271), "ids 271 and 280 are both written"),
    "cut at a zero": (put("model", "vocab", "ab\0c", value=271), "are both written 'ab'"),
    "no bytes": (lambda data: [data["model"]["vocab"].pop(f"<0x{byte:02X}>") for byte in range(256)], "<0x0A>"),
    "beyond the embedding": (put("model", "vocab", "far", value=5000), "5001 tokens and an embedding of 304 rows"),
    "far beyond": (put("model", "vocab", "far", value=2**31), "tokens and an embedding of 304 rows"),
    "negative": (put("model", "vocab", "ab", value=-1), "-1"),
    "no vocabulary": (put("model", "vocab", value=None), "null"),
    "no model": (put("model", value=None), "tokenizer"),
    "no merge": (put("model", "merges", value=[["x", "y"]]), "out of vocabulary"),
    "no normalizer": (put("normalizer", value={"type": "No"}), "tokenizer"),
    "no decoder": (put("decoder", value=[]), "tokenizer"),
    "other steps": (put("normalizer", value={"type": "Lowercase"}), "Lowercase|would not follow"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_llama(tmp_path_factory.mktemp("models") / "tiny", bos_token_id=1, eos_token_id=2)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("damage", VOCABULARIES)
def test_a_vocabulary_that_a_file_cannot_hold_is_refused(damage: str, tiny: Path, tmp_path: Path) -> None:
    change, says = VOCABULARIES[damage]
    folder = changed_copy(tiny, tmp_path / "model")
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises((UnsupportedError, SourceError), match=says) as refused:
        convert(str(folder), "gguf", "Q8_0", tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
