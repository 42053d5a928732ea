"""The bytes that conversions write, held against those that are stored beside this file.

Every method, format and option that changes bytes converts two small models: a real one of 260K parameters (a folder
that `--small` names, its MLP padded with zeros so that 4-bit codes fill words), and a random one whose rows hold whole
blocks of 256 weights. Eleven conversions of the demo model come on top. One thread; a process for each small model, and
for each case of the demo model. `keep` takes what rtn and gptq made.

Bytes depend on the processor's vector units and on torch, so hashes are stored for each pair of them.

python -m bench.same_bytes [--small FOLDER] [--models real,random,demo] [--only gptq,...] [--jobs 2] [--record]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

REPOSITORY = Path(__file__).parents[1]
STORED = Path(__file__).with_suffix(".json")
SMALL = REPOSITORY.parent / "shared" / "data" / "stories260k"
TEXT = REPOSITORY / "quantkit" / "data" / "sample_articles.txt"
CALIBRATION = {"text": str(TEXT), "sequences": 16, "length": 128}  # as few as learned rounding takes
INNER = 192  # channels of the real model's MLP, of which 172 are not zero
NEAREST = {"rounding": "nearest"}
AWQ_LAYOUT, PACKED, GGUF = {"format": "awq"}, {"format": "compressed-tensors"}, {"format": "gguf"}


class Case(NamedTuple):
    """One conversion; a `format` among the options is that of `convert`, a `model` among them a case made before."""

    model: str
    method: str
    bits: str
    options: dict[str, object]

    @property
    def name(self) -> str:
        """Model, method, bits and options in a line."""
        return " ".join([self.model, self.method, self.bits, *(f"{k}={v}" for k, v in self.options.items())])


GROUPED: dict[str, list[tuple[str, dict[str, object]]]] = {
    "rtn": [
        *((bits, {}) for bits in ("2", "3", "4", "8", "nvfp4", "mxfp4")),
        *(("4", form) for form in (AWQ_LAYOUT, PACKED, GGUF)),
        *(("4", {"group_size": size}) for size in (32, -1)),
        *(("4", {"sym": False} | form) for form in ({}, AWQ_LAYOUT, PACKED)),
        ("4", {"layer_bits": {"down_proj": 8}}),
        ("mxfp4", GGUF),
    ],
    "gptq": [
        *((bits, {}) for bits in ("2", "3", "4", "8", "nvfp4", "mxfp4")),
        *(("4", form) for form in (AWQ_LAYOUT, PACKED, GGUF)),
        *(("4", {"group_size": size}) for size in (32, -1)),
        *(
            ("4", {name: False})
            for name in ("sym", "static_groups", "scale_search", "refit", "gptaq", "true_sequential")
        ),
        *(("4", option) for option in ({"desc_act": True}, {"rounds": 1}, {"gptaq_share": 1.0}, {"ample_tokens": 0})),
        *(("4", option) for option in ({"damp_percent": 0.1}, {"shrinkage": 0.0}, {"layer_bits": {"down_proj": 8}})),
        *((bits, {"refine": True}) for bits in ("2", "4")),
        ("4", {"refine": True, "refine_steps": 0}),
        ("4", {"refine": True, "tune_steps": 0}),
        ("auto", {"target_bpw": 4.0}),
        ("auto", {"target_kld": 0.3, "target_bits": [3, 4]}),
    ],
    "awq": [
        *((bits, NEAREST | form) for bits, form in (("2", PACKED), ("3", PACKED), ("4", {}), ("8", PACKED))),
        *(("4", NEAREST | form) for form in (PACKED, {"sym": True} | GGUF, {"format": "gptq"}, {"group_size": 32})),
        *(("4", NEAREST | how) for how in ({"sym": True}, {"apply_clip": False}, {"refit": False}, {"n_grid": 5})),
        *((bits, PACKED) for bits in ("3", "4")),
        *(("4", option) for option in ({"rounds": 1}, {"refine": True}, NEAREST | {"refine": True})),
        ("auto", {"target_bpw": 4.0, "format": "compressed-tensors"}),
    ],
    "keep": [
        ("4", {"model": "rtn 4 sym=False format=awq"} | PACKED),
        ("4", {"model": "rtn 4"} | GGUF),
        ("4", {"model": "gptq 4"} | PACKED),
        ("4", {"model": "gptq 4 format=compressed-tensors", "format": "gptq"}),
    ],
    "nf4": [("4", {}), ("4", {"double_quant": False}), ("4", {"compute_dtype": "float32"})],
    "int8": [("8", option) for option in ({}, {"smooth": False}, {"rounding": "nearest"}, {"n_grid": 5})],
    "fp8": [("8", option) for option in ({}, {"granularity": "block"}, {"scale_search": False})],
    "float": [(bits, {}) for bits in ("float16", "bfloat16", "float32")],
    "ctranslate2": [
        (bits, {})
        for bits in (
            "int8", "int8_float16", "int8_bfloat16", "int8_float32", "int16", "float16", "bfloat16", "float32"
        )
    ],
}  # fmt: skip
PLAIN = ("F32", "F16", "BF16", "Q8_0")
K_QUANTS = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K")
BLOCKS: list[tuple[str, dict[str, object]]] = [
    *((bits, {}) for bits in (*PLAIN, *K_QUANTS, "IQ4_NL", "IQ4_XS")),
    *(("Q8_0", {"tensor_type": {"ffn_down": kind}}) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K")),
    *((bits, {"imatrix": True}) for bits in ("IQ1_S", "IQ2_XXS", "IQ2_S", "IQ3_S", "Q2_K", "Q4_K_M", "Q6_K")),
    *((bits, {"rounding": "gptq"}) for bits in ("IQ2_XS", "IQ3_XXS", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")),
    *((bits, {"rounding": "gptq", "refine": True}) for bits in ("IQ3_XXS", "Q2_K")),
    *((bits, {"rounding": "gptq", "awq": True}) for bits in ("IQ3_XXS", "Q3_K_M")),
    ("auto", {"imatrix": True, "target_bpw": 5.0}),
    ("Q4_K_M", {"token_embedding_type": "Q8_0", "output_tensor_type": "Q8_0"}),
    ("Q4_K_M", {"split_max_size": "0.4MB"}),
    ("Q4_K_M", {"vocab_only": True}),
]
DEMO: list[tuple[str, str, dict[str, object]]] = [
    ("gptq", "4", {}),
    ("gptq", "4", {"sym": False}),
    ("gptq", "4", {"refine": True}),
    ("awq", "4", NEAREST),
    ("awq", "4", {}),
    ("rtn", "4", {}),
    ("nf4", "4", {}),
    ("ctranslate2", "int8", {}),
    ("gguf", "Q4_K_M", {}),
    ("gguf", "Q4_K_M", {"imatrix": True}),
    ("gguf", "Q4_K_M", {"rounding": "gptq"}),
]
CONVERT = """
import hashlib, json, sys
import torch
import quantkit
torch.set_num_threads(1)
for name, model, method, bits, out, calibration, options in json.loads(sys.argv[1]):
    try:
        artifact = quantkit.convert(model, method, bits, out, calibration=calibration, **options)
    except quantkit.QuantkitError as error:
        files = {"refused": type(error).__name__}
    else:
        files = {file: hashlib.sha256((artifact.folder / file).read_bytes()).hexdigest()
                 for file in artifact.manifest.weight_files}
    print(json.dumps([name, files]), flush=True)
"""


def cases(models: list[str], only: tuple[str, ...]) -> list[Case]:
    """All cases of these models whose method begins with one of `only`; those of one model stand side by side."""
    # K-quants of the real model, whose rows hold no whole block, become other types: one case is enough.
    real = {**GROUPED, "gguf": [case for case in BLOCKS if case[0] in PLAIN or case == ("Q4_K_M", {})]}
    real["fp8"] = [case for case in GROUPED["fp8"] if "granularity" not in case[1]]  # its sides hold no block of 128
    head: dict[str, object] = {"head_bits": 8} | PACKED
    all_cases = [
        *(Case("real", method, *case) for method, asked in real.items() for case in asked),
        *(Case("random", method, *case) for method, asked in {**GROUPED, "gguf": BLOCKS}.items() for case in asked),
        *(Case("random", method, "4", head) for method in ("gptq", "rtn", "awq")),
        *(Case("demo", *case) for case in DEMO),
    ]
    return [case for case in all_cases if case.model in models and case.method.startswith(only)]


def save_padded(model: Path, folder: Path) -> Path:
    """A copy of a Llama checkpoint of one file that computes the same with `INNER` channels in its MLP."""
    tensors = load_file(model / "model.safetensors")
    for name, value in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = torch.nn.functional.pad(value, (0, 0, 0, INNER - value.shape[0]))
        elif name.endswith("down_proj.weight"):
            tensors[name] = torch.nn.functional.pad(value, (0, INNER - value.shape[1]))
    return _save(model, folder, tensors, {"intermediate_size": INNER})


def save_random(model: Path, folder: Path) -> Path:
    """A random Llama of two blocks, 256 wide, with a head of its own and the tokenizer of `model`."""
    from transformers import AutoConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "tie_word_embeddings": False}
    config = AutoConfig.from_pretrained(model, head_dim=32, **sizes)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    return _save(model, folder, tensors, {"head_dim": 32, **sizes})


def _save(model: Path, folder: Path, tensors: dict[str, torch.Tensor], changed: dict[str, object]) -> Path:
    shutil.copytree(model, folder, copy_function=shutil.copyfile)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text(encoding="utf-8")) | changed
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def hashes(asked: list[Case], folder: Path) -> dict[str, dict[str, str]]:
    """sha256 of each weight file by the case's name, of conversions in one process; of a refused one its error."""

    def out(name: str) -> str:
        return str(folder / name.replace("/", "-"))

    jobs = []
    for case in asked:
        options = dict(case.options)
        before = options.pop("model", None)
        place = case.model if case.model == "demo" else str(folder / case.model)
        model = place if before is None else out(f"{case.model} {before}")
        jobs.append([case.name, model, case.method, case.bits, out(case.name), CALIBRATION, options])
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, json.dumps(jobs)], capture_output=True, text=True, env=variables,
        cwd=REPOSITORY, check=False,
    )  # fmt: skip
    made = dict(json.loads(line) for line in done.stdout.splitlines())
    if done.returncode != 0:
        raise RuntimeError(f"{jobs[len(made)][0]}: {done.stderr.strip().splitlines()[-1]}")
    return made


def platform() -> str:
    """What the bytes may depend on, beside the code."""
    return f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__.split('+')[0]}"


def main() -> int:
    """Convert, compare, print, and return the exit code. A refused case proves nothing, and fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=Path, default=SMALL)
    parser.add_argument("--models", default="real,random,demo")
    parser.add_argument("--only", default="", help="begin of the names of methods, comma-separated")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--record", action="store_true", help="store the hashes of this version")
    given = parser.parse_args()
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.is_file() else {}
    known = stored.setdefault(platform(), {})
    models = given.models.split(",")
    asked = list(cases(models, tuple(given.only.split(","))))
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="quantkit-bytes-") as folder, ThreadPoolExecutor(given.jobs) as pool:
        save_padded(given.small, Path(folder) / "real")
        save_random(given.small, Path(folder) / "random")

        groups = [list(group) for _, group in groupby(asked, lambda case: case if case.model == "demo" else case.model)]
        for made in pool.map(lambda group: hashes(group, Path(folder)), groups):
            for name, files in made.items():
                seen = "equal" if known.get(name) == files else "DIFFERS" if name in known else "new"
                verdict = "refused" if "refused" in files else seen
                verdicts[verdict] += 1
                print(f"{verdict:<8} {name}", flush=True)
                if given.record:
                    known[name] = files
    if given.record:
        text = json.dumps(stored, indent=1, sort_keys=True)
        STORED.write_text(text + "\n", encoding="utf-8")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    print(f"{len(asked)} conversions on {platform()}: {counts}")
    return int(verdicts["DIFFERS"] + verdicts["refused"] > 0)


if __name__ == "__main__":
    sys.exit(main())
