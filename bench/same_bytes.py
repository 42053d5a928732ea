"""The bytes that conversions write: one sha256 for each weight file, to be held against those of another version.

Each method converts a real 260K-parameter model (a folder that `--small` names) and the demo model, at one thread, each
in a fresh process. Two versions that print the same lines write the same weights on this machine. The small model's MLP
of 172 channels fills no words of 4-bit codes: GPTQ's and AWQ's layouts get a copy whose MLP has zeros up to 192.

python -m bench.same_bytes [--small FOLDER] [--models small,demo] [--only gptq,...] [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

REPOSITORY = Path(__file__).parents[1]
SMALL = REPOSITORY.parent / "shared" / "data" / "stories260k"
TEXT = REPOSITORY / "quantkit" / "data" / "sample_articles.txt"
CALIBRATION = {"text": str(TEXT), "sequences": 16, "length": 128}  # as few as learned rounding takes
# Name: method, bits, options.
CASES: dict[str, tuple[str, str, dict[str, object]]] = {
    "gptq 4": ("gptq", "4", {}),
    "gptq 4 no-sym": ("gptq", "4", {"sym": False}),
    "gptq 4 refine": ("gptq", "4", {"refine": True}),
    "awq 4": ("awq", "4", {}),
    "awq 4 gptq": ("awq", "4", {"rounding": "gptq"}),
    "rtn 4": ("rtn", "4", {}),
    "nf4": ("nf4", "4", {}),
    "ctranslate2 int8": ("ctranslate2", "int8", {}),
    "gguf Q4_K_M": ("gguf", "Q4_K_M", {}),
    "gguf Q4_K_M imatrix": ("gguf", "Q4_K_M", {"imatrix": True}),
    "gguf Q4_K_M gptq": ("gguf", "Q4_K_M", {"rounding": "gptq"}),
}
PADDED = ("gptq", "awq", "rtn")
INNER = 192
CONVERT = """
import hashlib, json, sys
import torch
import quantkit
torch.set_num_threads(1)
model, method, bits, out, calibration, options = json.loads(sys.argv[1])
artifact = quantkit.convert(model, method, bits, out, calibration=calibration, **options)
for name in artifact.manifest.weight_files:
    print(name, hashlib.sha256((artifact.folder / name).read_bytes()).hexdigest())
"""


def save_padded(model: Path, folder: Path) -> Path:
    """A copy of a Llama checkpoint of one file that computes the same with `INNER` channels in its MLP."""
    tensors = load_file(model / "model.safetensors")
    for name, value in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = torch.nn.functional.pad(value, (0, 0, 0, INNER - value.shape[0]))
        elif name.endswith("down_proj.weight"):
            tensors[name] = torch.nn.functional.pad(value, (0, INNER - value.shape[1]))
    shutil.copytree(model, folder, copy_function=shutil.copyfile)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text(encoding="utf-8")) | {"intermediate_size": INNER}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def weight_hashes(model: str, case: str, folder: Path) -> list[str]:
    """Lines `FILE SHA256` of one conversion in a process of its own; raises RuntimeError with what it said."""
    method, bits, options = CASES[case]
    out = folder / f"{Path(model).name}-{case.replace(' ', '-')}"
    arguments = json.dumps([model, method, bits, str(out), CALIBRATION, options])
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, arguments], capture_output=True, text=True, env=variables, cwd=REPOSITORY,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{case} of {model}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.splitlines()


def main() -> int:
    """Convert, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=Path, default=SMALL)
    parser.add_argument("--models", default="small,demo")
    parser.add_argument("--only", default="", help="begin of the names of cases, comma-separated")
    parser.add_argument("--jobs", type=int, default=1, help="conversions at a time")
    given = parser.parse_args()
    only = tuple(given.only.split(","))
    cases = [(name, case) for name in given.models.split(",") for case in CASES if case.startswith(only)]
    with tempfile.TemporaryDirectory(prefix="quantkit-bytes-") as folder, ThreadPoolExecutor(given.jobs) as pool:
        padded = save_padded(given.small, Path(folder) / "padded")

        def model_for(name: str, case: str) -> str:
            return name if name == "demo" else str(padded if case.startswith(PADDED) else given.small)

        work = [
            (name, case, pool.submit(weight_hashes, model_for(name, case), case, Path(folder))) for name, case in cases
        ]
        for name, case, hashes in work:
            for line in hashes.result():
                print(f"{name:<6} {case:<20} {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
