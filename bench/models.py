"""The two measured models: the demo model (`f`), and that one with wider matrices (`k`).

The packaged model's weights were 4-bit once, and 4-bit schemes would look better on it than on other models. Both
transforms leave the function as it is, which is checked on a text:

f: moved off its grid, as the demo model is; see quantkit/data/demo.py.
k: f with hidden size 768 and 12/4 heads, by zeros: every matrix has rows of a multiple of 256.

python -m bench.models [f k]
"""

from __future__ import annotations

import argparse
import copy
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.folders import BenchError, models_folder
from quantkit.data import demo

NAMES = {"f": "smollm2-135m-f", "k": "smollm2-135m-k"}
WIDE = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4}
CHECK_TEXT = "The history of the city begins in the twelfth century, when monks built 3 mills on the river. " * 12
LARGEST_CHANGE = 1e-3  # of the mean loss, in nats


def model_folder(key: str) -> Path:
    """The checkpoint of the model `f` or `k`, made on first use."""
    folder = models_folder() / NAMES[key]
    if not (folder / "config.json").is_file():
        _make_all()
    return folder


@torch.no_grad()
def widen(model: Any) -> Any:
    """Return the model with `WIDE` sizes: zeros in the new rows, columns and heads; the function stays."""
    from transformers import AutoConfig, AutoModelForCausalLM

    old = model.config
    settings = {key: value for key, value in old.to_dict().items() if key != "quantization_config"}
    config = AutoConfig.for_model(**settings)
    for key, value in WIDE.items():
        setattr(config, key, value)
    config.head_dim = old.hidden_size // old.num_attention_heads
    # The norms now average over channels that are zero, too.
    config.rms_norm_eps = old.rms_norm_eps * old.hidden_size / config.hidden_size
    ratio = math.sqrt(old.hidden_size / config.hidden_size)
    wide = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    values = model.state_dict()
    for name, parameter in wide.named_parameters():
        value = values[name] * ratio if name.endswith("norm.weight") else values[name]
        parameter.zero_()
        parameter[tuple(slice(size) for size in value.shape)] = value
    return wide


@torch.no_grad()
def mean_loss(model: Any, ids: torch.Tensor) -> float:
    """Mean loss in nats of each next token of ids (1, T)."""
    logits = model(ids).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))


def _source() -> tuple[Any, Any]:
    """The packaged model in float32, as its file gives it, and its tokenizer."""
    with tempfile.TemporaryDirectory() as temp:
        return demo.load_dequantized(demo.fetch(Path(temp)))


def _make_all() -> None:
    model, tokenizer = _source()
    ids = tokenizer(CHECK_TEXT, return_tensors="pt").input_ids
    wanted = mean_loss(model, ids)
    for key, change in (("f", demo.leave_grid), ("k", widen)):
        model = change(model)
        if abs(mean_loss(model, ids) - wanted) > LARGEST_CHANGE:
            raise BenchError(f"{NAMES[key]} does not compute what the demo model computes")
        _save(model, tokenizer, models_folder() / NAMES[key])


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    kept = copy.deepcopy(model).to(torch.bfloat16)
    kept.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def main() -> None:
    """Make the named models and print their folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", default=list(NAMES), choices=list(NAMES))
    for key in parser.parse_args().keys:
        print(model_folder(key))


if __name__ == "__main__":
    main()
