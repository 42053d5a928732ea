"""Perplexity, and mean KL divergence from the source model, of any tool's artifact: one judge for all.

The papers' protocol on the evaluation text: rows joined with a blank line, windows of 2048 tokens side by side, every
position that has a next token counts; or llama.cpp's, windows of 512 whose second half counts. Both models compute in
bfloat16, with weights as the file says them, rounded to bfloat16. The source's last hidden states are kept, so that it
runs once for each model.

python -m bench.judge --model CHECKPOINT --artifact FOLDER [--windows 20] [--protocol papers] [--threads 1]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.folders import BenchError, evaluation_text, work_folder
from bench.readers import read_values, rounds_inputs, weight_files
from quantkit.data.texts import load_text
from quantkit.evaluation.protocols import cut
from quantkit.models.config import load_tokenizer
from quantkit.numerics.matmul import product, use_products

DTYPE = torch.bfloat16
CHUNK = 256  # positions whose logits are in memory


@dataclass
class Hidden:
    """What gives logits: last hidden states (windows, T, hidden) and the output head (V, hidden), bfloat16."""

    states: torch.Tensor
    head: torch.Tensor

    def log_probs(self, window: int, start: int, stop: int) -> torch.Tensor:
        """Log-probabilities (stop - start, V) float32 of a part of a window."""
        return product(self.states[window, start:stop], self.head).float().log_softmax(-1)


def load(config_folder: Path, values: Iterator[tuple[str, torch.Tensor]]) -> Any:
    """The transformers model of a checkpoint's configuration with `values` rounded to bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(config_folder)
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    use_products(model)
    wanted = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(wanted)
    for name, value in values:
        if name in wanted:
            parameter = wanted.pop(name)
            if parameter.shape != value.shape:
                raise BenchError(f"{name} has the shape {tuple(value.shape)}, expected {tuple(parameter.shape)}")
            parameter.data.copy_(value.to(DTYPE))
        elif name not in tied:
            raise BenchError(f"the artifact holds {name}, which the model has not")
    if wanted:
        raise BenchError(f"the artifact has no values for {min(wanted)}")
    return model


def round_inputs(model: Any, names: set[str]) -> None:
    """Let the inputs of those layers be rounded to 8-bit integers with one scale a token, as engines of W8A8 do."""

    def rounded(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        scale = inputs[0].float().abs().amax(-1, keepdim=True) / 127
        codes = torch.round(inputs[0].float() / torch.where(scale > 0, scale, 1)).clamp(-128, 127)
        return ((codes * scale).to(inputs[0].dtype),)

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(rounded)


@torch.inference_mode()
def hidden_of(model: Any, tokens: torch.Tensor) -> Hidden:
    """Run all windows through the model without its head."""
    states = [model.base_model(input_ids=window[None], use_cache=False).last_hidden_state[0] for window in tokens]
    return Hidden(torch.stack(states), model.get_output_embeddings().weight.detach())


def source_hidden(model: Path, tokens: torch.Tensor) -> Hidden:
    """The source's hidden states, from the file that an earlier run kept."""
    digest = hashlib.sha256(tokens.numpy().tobytes())
    for file in weight_files(model):
        digest.update(f"{file}{file.stat().st_size}{file.stat().st_mtime_ns}".encode())
    path = work_folder() / f"hidden-{model.name}-{digest.hexdigest()[:16]}.pt"
    if path.is_file():
        kept = torch.load(path, weights_only=True)
        return Hidden(kept["states"], kept["head"])
    found = hidden_of(load(model, read_values(model)), tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({"states": found.states, "head": found.head}, partial)
    partial.rename(path)
    return found


@torch.inference_mode()
def compare(
    source: Hidden, other: Hidden, tokens: torch.Tensor, first: int = 0, save: Path | None = None
) -> dict[str, float]:
    """Perplexity of both, and the mean of KL(source || other), with standard errors over the positions from `first` on.

    With `save` the divergences of all positions, (n,) float64, are written there.
    """
    nll: dict[str, list[torch.Tensor]] = {"source": [], "other": []}
    divergence: list[torch.Tensor] = []
    last = tokens.shape[1] - 1
    for window, ids in enumerate(tokens):
        for start in range(first, last, CHUNK):
            stop = min(start + CHUNK, last)
            p, q = source.log_probs(window, start, stop), other.log_probs(window, start, stop)
            targets = ids[start + 1 : stop + 1, None]
            nll["source"].append(-p.gather(1, targets)[:, 0].double())
            nll["other"].append(-q.gather(1, targets)[:, 0].double())
            divergence.append((p.exp() * (p - q)).sum(-1).double())
    if save is not None:
        torch.save(torch.cat(divergence), save)
    kld, kld_se = _mean_and_error(torch.cat(divergence))
    mean, error = _mean_and_error(torch.cat(nll["other"]))
    source_mean, _ = _mean_and_error(torch.cat(nll["source"]))
    if not math.isfinite(kld) or not math.isfinite(mean):
        raise BenchError("the artifact gives values that are not finite")
    return {
        "kld": kld,
        "kld_se": kld_se,
        "perplexity": math.exp(min(mean, 700.0)),
        "perplexity_se": math.exp(min(mean, 700.0)) * error,
        "source_perplexity": math.exp(source_mean),
        "positions": sum(len(part) for part in divergence),
    }


def _mean_and_error(values: torch.Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def judge(model: Path, artifact: Path, windows: int, protocol: str, save: Path | None) -> dict[str, float]:
    """Figures of one artifact."""
    text = load_text(str(evaluation_text()), "evaluation")
    found = cut(text, load_tokenizer(model), protocol, limit=windows)
    tokens = torch.from_numpy(np.stack([window.ids for window in found.windows]))
    source = source_hidden(model, tokens)
    quantized = load(model, read_values(artifact))
    if not next(artifact.glob("*.gguf"), None):
        round_inputs(quantized, rounds_inputs(artifact))
    other = hidden_of(quantized, tokens)
    return {
        "bytes": sum(file.stat().st_size for file in weight_files(artifact)),
        **compare(source, other, tokens, found.about.first, save),
    }


def main() -> None:
    """Print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint of the source")
    parser.add_argument("--artifact", type=Path, required=True, help="folder of the quantized model")
    parser.add_argument("--windows", type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument("--protocol", default="papers", help="papers or llama.cpp (default: %(default)s)")
    parser.add_argument("--save", type=Path, help="file for the divergences of all positions")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(json.dumps(judge(asked.model, asked.artifact, asked.windows, asked.protocol, asked.save)))


if __name__ == "__main__":
    main()
