"""The process that all cases are forked from: everything is imported in it, and nothing is computed."""

from __future__ import annotations

import contextlib
import gc
import os
import pkgutil
from importlib import import_module

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def get_ready() -> None:
    """Import, and leave no thread behind."""
    for name in THREADS:
        os.environ[name] = "1"
    os.environ |= {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "COLUMNS": "300",
        "MPLBACKEND": "agg",
    }
    import torch

    torch.set_num_threads(1)
    import quantkit

    for module in pkgutil.walk_packages(quantkit.__path__, "quantkit."):
        if not module.name.endswith(("vllm", "__main__", "_search")):
            import_module(module.name)
    for name in OFTEN_USED:
        with contextlib.suppress(ImportError):  # some are others' own, and may have another name tomorrow
            import_module(name)
    _warm_up()
    from bench.fuzz.children import fork_own_modules

    fork_own_modules()
    gc.collect()
    gc.freeze()


def _warm_up() -> None:
    """Let transformers make the tables that it keeps; each case would make them again, in half its time."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
    import torch

    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))


OFTEN_USED = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "gemma2", "gpt2", "mixtral")),
    "transformers.models.llama.tokenization_llama",
    "transformers.tokenization_utils_fast",
    "safetensors.torch",
    "bitsandbytes",
    "ctranslate2",
    "llama_cpp",
    "gguf",
    "typer._adapters",
    "typer._click.decorators",
    "rich._emoji_codes",
    "platformdirs.unix",
    "ctranslate2.converters.transformers",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.gpt2.tokenization_gpt2",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "pydantic",
    "rich.progress",
    "yaml",
)
