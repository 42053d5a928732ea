"""Tiny checkpoints that every method takes, changed copies of them, and the command line called in this process."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from safetensors.torch import load_file, save_file
from test_gguf_write import save_tokenizer
from tiny_llama import save_llama

from quantkit.cli import main

SAMPLE = Path(__file__).parents[1] / "quantkit" / "data" / "sample_articles.txt"
RECIPES = Path(__file__).parents[1] / "recipes"
CALIBRATION = {"text": str(SAMPLE), "sequences": 8, "length": 32}
CALIBRATION_FLAGS = [
    *("--calibration-text", SAMPLE),
    *("--calibration-sequences", 8),
    *("--calibration-length", 32),
]
# A small evaluation: two windows of 64 tokens at one thread.
EVALUATION: dict[str, Any] = {"text": str(SAMPLE), "n_ctx": 64, "limit": 2, "threads": (1,)}
EVALUATION_FLAGS = ["--text", SAMPLE, "--n-ctx", 64, "--limit", 2]


def save_tiny(folder: Path, **changes: Any) -> Path:
    """The tiny llama with a SentencePiece-like tokenizer, which llama.cpp follows too."""
    save_llama(folder, bos_token_id=1, eos_token_id=2, **changes)
    save_tokenizer(folder)
    return folder


def changed_copy(
    source: Path, folder: Path, change: Callable[[dict[str, Any]], object] | None = None, **config: Any
) -> Path:
    """A copy of a checkpoint with changed tensors and config values."""
    shutil.copytree(source, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code, and what it wrote."""

    code: int
    out: str
    err: str


def quantkit(*arguments: object) -> Ended:
    """Run the command line in this process, on a terminal of 300 columns."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["quantkit", *map(str, arguments)]),
        patch.dict(os.environ, COLUMNS="300"),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code: Any = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    return Ended(code, out.getvalue(), err.getvalue())
