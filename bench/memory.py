"""Peak memory of GPTQ, AWQ and GGUF on a checkpoint with Llama-2-7B's shapes and few blocks of random weights.

`fp8-gguf` is GGUF of such a checkpoint whose linear layers are FP8 in blocks of 128 x 128. With twice the blocks the
memory should stay and the time double. Writes bench/results/memory.json; exit code 1 where a peak is 6 GB or more (1.5
for GGUF), or grows by more than a tenth with the blocks.

python -m bench.memory [--blocks 4 8] [--methods gptq awq gguf fp8-gguf] [--sequences 16] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, PreTrainedTokenizerFast

from bench.folders import REPOSITORY, RESULTS
from bench.measure import run

LIMITS_GB = {"gptq": 6.0, "awq": 6.0, "gguf": 1.5, "fp8-gguf": 1.5}
BLOCK, LARGEST = 128, 448.0  # of FP8: rows and columns, and the largest code
LIMIT_S = 7200.0
GROWTH = 1.1
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
VOCABULARY = 32000
LLAMA_2_7B = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, vocab_size=VOCABULARY)
LLAMA_3_8B = LlamaConfig(  # but for the vocabulary: blocks are measured
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=VOCABULARY
)


def tensors_of_block(index: int, config: LlamaConfig = LLAMA_2_7B) -> dict[str, tuple[int, ...]]:
    """Shapes of one block's tensors by name."""
    prefix, hidden, inner = f"model.layers.{index}.", config.hidden_size, config.intermediate_size
    keys = hidden * config.num_key_value_heads // config.num_attention_heads
    attention = {f"self_attn.{name}_proj.weight": (hidden if name in "qo" else keys, hidden) for name in "qkvo"}
    wide = {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    norms = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes = attention | wide | {"mlp.down_proj.weight": (hidden, inner)} | norms
    return {prefix + name: shape for name, shape in shapes.items()}


def _fp8(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The codes of a layer and their scales."""
    rows, columns = (side // BLOCK for side in value.shape)
    blocks = value.float().reshape(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)) / LARGEST
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).reshape(value.shape)
    return {name: codes, f"{name}_scale_inv": scales}


def make_checkpoint(folder: Path, blocks: int, fp8: bool = False, config: LlamaConfig = LLAMA_2_7B) -> None:
    """Write a sharded checkpoint, one shard for each block, with a byte-level tokenizer."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    ends = {
        "model.embed_tokens.weight": (VOCABULARY, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
        "lm_head.weight": (VOCABULARY, config.hidden_size),
    }
    where: dict[str, str] = {}
    for number, shapes in enumerate([ends, *(tensors_of_block(i, config) for i in range(blocks))], 1):
        shard = f"model-{number:05d}-of-{blocks + 1:05d}.safetensors"
        values = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else (torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(torch.bfloat16)
            for name, shape in shapes.items()
        }
        if fp8 and number > 1:
            parts = (_fp8(n, v) if v.ndim == 2 else {n: v} for n, v in values.items())
            values = {name: value for part in parts for name, value in part.items()}
        save_file(values, folder / shard, metadata={"format": "pt"})
        where.update(dict.fromkeys(values, shard))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    about = {"num_hidden_layers": blocks, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    about |= {"quantization_config": FP8} if fp8 else {}
    LlamaConfig(**{**config.to_diff_dict(), **about}).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _weights(blocks: int) -> int:
    ends = (2 * VOCABULARY + 1) * LLAMA_2_7B.hidden_size
    return ends + sum(math.prod(shape) for i in range(blocks) for shape in tensors_of_block(i).values())


def _options(method: str, sequences: int) -> list[str]:
    if method.endswith("gguf"):
        return ["--bits", "Q4_K_M"]
    text = REPOSITORY / "quantkit" / "data" / "sample_articles.txt"
    calibration = ["--calibration-sequences", str(sequences), "--calibration-length", "512"]
    return ["--bits", "4", "--group-size", "128", "--calibration-text", str(text), *calibration]


def main() -> int:
    """Convert with each method at each number of blocks, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--methods", nargs="+", default=list(LIMITS_GB))
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--make", type=Path, help="only write the checkpoint with --blocks blocks into this folder")
    parser.add_argument("--fp8", action="store_true", help="with --make: linear layers of FP8 codes")
    asked = parser.parse_args()
    if asked.make is not None:
        make_checkpoint(asked.make, asked.blocks[0], asked.fp8)
        return 0
    variables = os.environ | ({"OMP_NUM_THREADS": str(asked.threads)} if asked.threads else {})
    rows: list[dict[str, Any]] = []
    for blocks in asked.blocks:
        with tempfile.TemporaryDirectory() as work:
            for method in asked.methods:
                kind, _, name = method.rpartition("-")
                source = Path(work) / f"source{kind}"
                if not source.exists():
                    # In a process of its own: a child's peak counts what its parent held when it was started.
                    making = [sys.executable, "-m", "bench.memory", "--make", str(source), "--blocks", str(blocks)]
                    subprocess.run(making + (["--fp8"] if kind else []), check=True, cwd=REPOSITORY)
                out = Path(work) / method
                command = [str(Path(sys.executable).parent / "quantkit"), "convert", str(source), "--method", name]
                command += ["--out", str(out), *_options(method, asked.sequences)]
                done = run(command, variables, Path(work) / f"{method}.log", LIMIT_S, Path(work))
                if done.code:
                    print(f"{method}, {blocks} blocks failed: {done.reason}")
                    return 1
                figures = {"peak_gb": done.peak_gb, "cpu_s": done.cpu_s, "wall_s": done.wall_s}
                figures["s_per_billion_weights"] = done.wall_s / (_weights(blocks) / 1e9)
                rows.append({"method": method, "blocks": blocks} | {k: round(v, 2) for k, v in figures.items()})
                print(rows[-1], flush=True)
                shutil.rmtree(out)
    missed = [
        f"{row['method']}, {row['blocks']} blocks: {row['peak_gb']} GB, less than {LIMITS_GB[row['method']]} asked"
        for row in rows
        if row["peak_gb"] >= LIMITS_GB[row["method"]]
    ]
    for method in asked.methods:
        peaks = [row["peak_gb"] for row in rows if row["method"] == method]
        if max(peaks) > GROWTH * min(peaks):
            missed.append(f"{method}: the peak grows with the blocks, {peaks} GB")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "memory.json").write_text(
        json.dumps({"sequences": asked.sequences, "rows": rows, "missed": missed}, indent=2)
    )
    for line in missed:
        print("MISSED", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
