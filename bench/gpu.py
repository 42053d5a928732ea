"""What a GPU makes of it: the device tests, seconds and memory a block of Llama-3-8B's shapes, evaluation, equal loss.

Needs no network. `make gpu-kit` collects the packages that a machine with torch and transformers may lack. With
--device pretended the values are computed on the CPU and devices are not mixed (tests/pretended_device.py).
Writes gpu.json into --out, and prints the same as one table.

python -m bench.gpu [--device auto] [--blocks 3] [--sequences 128] [--model demo] [--small] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from bench.folders import REPOSITORY, RESULTS
from bench.memory import LLAMA_3_8B, VOCABULARY, make_checkpoint
from quantkit import convert, evaluate
from quantkit.contracts.engine import LoadSpec, Window
from quantkit.contracts.registry import find_engine
from quantkit.errors import UnsupportedError
from quantkit.formats.source import open_model
from quantkit.records.recipe import EngineSpec
from quantkit.system.device import device_label, find_device
from quantkit.system.memory import device_peak_bytes
from quantkit.system.processor import usable_cores
from quantkit.system.progress import Progress, Step

sys.path.insert(0, str(REPOSITORY / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ALL_BLOCKS = 32
TEXT = str(REPOSITORY / "quantkit" / "data" / "sample_articles.txt")
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptq": ("gptq", "4", {}),
    "awq --rounding nearest": ("awq", "4", {"rounding": "nearest"}),
    "awq": ("awq", "4", {}),
    "gguf Q4_K_M --rounding gptq": ("gguf", "Q4_K_M", {"rounding": "gptq"}),
}
SMALL = {"gptq 8": ("gptq", "8", {}), "awq 2": ("awq", "2", {})}  # for models with odd shapes
CONTEXT, WINDOWS = 2048, 8
SMALL_BLOCKS = LlamaConfig(hidden_size=512, intermediate_size=1024, num_attention_heads=8, vocab_size=VOCABULARY)


class Blocks:
    """The seconds that each block of a conversion took, as its progress tells."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def __call__(self, step: Step) -> None:
        """Take a change of a step."""
        if step.title.endswith("calibrating blocks") and not step.ended:
            now = time.monotonic()
            if step.done:
                self.seconds.append(now - self._last)
            self._last = now


def _restart_peak() -> None:
    if torch.accelerator.is_available():
        getattr(torch.get_device_module(), "reset_peak_memory_stats", lambda: None)()


def measure_conversion(name: str, source: Path, out: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds and peak of a block, the first one left out where there are several, and the whole model's minutes."""
    method, bits, options = METHODS[name]
    blocks = Blocks()
    calibration = {"text": TEXT, "sequences": asked.sequences, "length": 512}
    _restart_peak()
    convert(
        str(source),
        method,
        bits,
        out,
        calibration=calibration,
        device=asked.device,
        progress=Progress(blocks),
        **options,
    )
    seconds = statistics.median(blocks.seconds[1:] or blocks.seconds)
    figures = {"s_per_block": seconds, "peak_gb": device_peak_bytes() / 1e9}
    return {"what": name, **figures, "minutes_of_32": seconds * ALL_BLOCKS / 60}


def measure_evaluation(source: Path, asked: argparse.Namespace, walk: bool) -> dict[str, Any]:
    """Tokens/s of our reader on windows of random ids, whole or block by block."""
    spec = LoadSpec(usable_cores(), CONTEXT, "bfloat16", asked.device, walk)
    generator = np.random.default_rng(0)
    windows = [Window(generator.integers(0, 256, CONTEXT), CONTEXT - 1, np.zeros(1, np.int64)) for _ in range(WINDOWS)]
    _restart_peak()
    loaded = find_engine("reference").load(open_model(str(source)), spec)
    for _ in loaded.pieces(windows[:1]):
        pass
    began = time.monotonic()
    for _ in loaded.pieces(windows):
        pass
    rate = CONTEXT * WINDOWS / (time.monotonic() - began)
    way = "block by block" if walk else "whole"
    return {"what": f"evaluation, {way}", "tokens_per_s": rate, "peak_gb": device_peak_bytes() / 1e9}


def measure_loss(name: str, work: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """The divergence from a real model of the copy that the CPU made, and of the one that the device made."""
    method, bits, options = (METHODS | SMALL)[name]
    figures: dict[str, Any] = {"what": f"{name} of {Path(asked.model).name}"}
    calibration = {"text": TEXT, "sequences": 32, "length": 256}
    for key, device, place in (("kld_cpu", "cpu", nullcontext()), ("kld_gpu", asked.device, on_device(asked))):
        out, how = work / f"{name}-{key}", {"calibration": calibration, "device": device}
        try:
            with place:
                made = convert(asked.model, method, bits, out, **how, **options)
        except UnsupportedError as error:
            return figures | {"says": str(error).partition(". ")[0]}
        ours = EngineSpec(engine="reference", device="cpu")
        report = evaluate(made, ["perplexity"], engine=ours, limit=8, source=asked.model)
        found = report.find("kld")
        assert found is not None
        figures |= {key: found.value, f"{key}_se": found.stderr}
    return figures


def run_tests() -> dict[str, Any]:
    """Run the tests of a device, on the machine's GPU or on a pretended one."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/conversion/test_device.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    return {"what": "tests", "passed": done.returncode == 0, "says": (done.stdout.strip().splitlines() or [""])[-1]}


def on_device(asked: argparse.Namespace) -> AbstractContextManager[Any]:
    """The pretended device where that is asked for; nothing for a real one."""
    if asked.device != "card":
        return nullcontext()
    from pretended_device import pretended_device

    return pretended_device()


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """One table of all rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row if not key.endswith("_se")))
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v := row.get(key, ""), float) else str(v) for key in columns))
    Console(width=180).print(table)


def main() -> int:
    """Measure everything, print the table; exit code 1 where a test failed or a device loses more than the CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, or pretended")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--small", action="store_true", help="small blocks, to try the script without a GPU")
    asked = parser.parse_args()
    pretended = asked.device == "pretended"
    asked.device = "card" if pretended else find_device(asked.device)
    began = time.monotonic()
    rows = [] if asked.no_tests else [run_tests()]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        rows += [measure_loss(name, work, asked) for name in METHODS | SMALL]
        make_checkpoint(work / "blocks", asked.blocks, config=SMALL_BLOCKS if asked.small else LLAMA_3_8B)
        with on_device(asked):
            rows += [measure_evaluation(work / "blocks", asked, walk) for walk in (False, True)]
            rows += [measure_conversion(name, work / "blocks", work / name, asked) for name in METHODS]
            title = (
                f"{device_label(asked.device)}, torch {torch.__version__}, {asked.blocks} blocks of Llama-3-8B's shapes"
            )
    asked.out.mkdir(parents=True, exist_ok=True)
    about = {"device": title, "sequences": asked.sequences, "seconds": time.monotonic() - began, "rows": rows}
    (asked.out / "gpu.json").write_text(json.dumps(about, indent=2))
    print_table(rows, title)
    print(f"{about['seconds']:.0f} s")
    return 1 if any(map(_is_bad, rows)) else 0


def _is_bad(row: dict[str, Any]) -> bool:
    if "kld_gpu" in row:
        chance = 3 * (row["kld_cpu_se"] ** 2 + row["kld_gpu_se"] ** 2) ** 0.5
        return bool(abs(row["kld_gpu"] - row["kld_cpu"]) > chance)
    return not row.get("passed", True)


if __name__ == "__main__":
    sys.exit(main())
