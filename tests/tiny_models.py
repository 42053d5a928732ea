"""Tiny checkpoints that every method takes, changed copies of them, and the command line called in this process."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from edits import edit_json, edit_tensors
from gguf_files import save_tokenizer
from tiny_llama import save_llama

from quantkit.cli import options
from quantkit.cli.app import main
from quantkit.contracts.registry import methods
from quantkit.conversion.check import prepare
from quantkit.conversion.convert import recipe_of

FLOAT_METHODS = [name for name in methods() if name != "keep"]  # which refuses all that is not quantized
SAMPLE = Path(__file__).parents[1] / "quantkit" / "data" / "sample_articles.txt"
CALIBRATION = {"text": str(SAMPLE), "sequences": 8, "length": 32}
CALIBRATION_FLAGS = [*("--calibration-text", SAMPLE), *("--calibration-sequences", 8), *("--calibration-length", 32)]
# A small evaluation: two windows of 64 tokens at one thread.
EVALUATION = {"text": str(SAMPLE), "n_ctx": 64, "limit": 2, "threads": (1,)}
EVALUATION_FLAGS = ["--text", SAMPLE, "--n-ctx", 64, "--limit", 2]


def save_tiny(folder, **changes):
    """The tiny llama with a SentencePiece-like tokenizer, which llama.cpp follows too."""
    save_llama(folder, bos_token_id=1, eos_token_id=2, **changes)
    save_tokenizer(folder)
    return folder


def prepare_job(model, method, bits=None, calibration=None, **settings):
    """The prepared job of `quantkit.convert` with these arguments."""
    recipe, resources = recipe_of(model, method, bits, calibration, settings)
    return prepare(recipe, resources=resources)


def changed_copy(source, folder, change=None, **config):
    """A copy of a checkpoint with changed tensors and config values."""
    shutil.copytree(source, folder)
    edit_json(folder / "config.json", lambda values: values.update(config))
    if change is not None:
        edit_tensors(folder, change)
    return folder


def conversion_by(method, model, out):
    """Words of the command that converts with `CALIBRATION`."""
    return [str(word) for word in ("convert", model, "--method", method, "--out", out, *CALIBRATION_FLAGS)]


def without_progress(text):
    """What a command told on standard error, but for the lines of its steps."""
    return PROGRESS.sub("", text)


PROGRESS = re.compile(
    r"^(?:device: |evaluated (?:whole|block by block)|"
    r".*: (?:done, |ended at \d+%, |\d+% after |perplexity .* ms/token @ )).*\n",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code, and what it wrote, but for progress."""

    code: int
    out: str
    err: str


def quantkit(*arguments):
    """Run the command line in this process, on a terminal of 300 columns."""
    out, err = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    with (
        patch.object(sys, "argv", ["quantkit", *map(str, arguments)]),
        patch.dict(os.environ, COLUMNS="300"),
        patch.object(options.out, "_width", 300),  # it keeps the COLUMNS of its import
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            signal.signal(signal.SIGTERM, handler)
    return Ended(code, out.getvalue(), without_progress(err.getvalue()))


def succeeds(*arguments):
    """Run a command that must end well."""
    ended = quantkit(*arguments)
    assert ended.code == 0, ended.err
    return ended


def fails(*arguments, says=""):
    """Run a command that must end with code 1, and say so."""
    ended = quantkit(*arguments)
    assert ended.code == 1, ended
    assert says in ended.err, ended.err
    return ended


def command_line(*arguments, **environment):
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "quantkit", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
