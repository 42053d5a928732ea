"""Artifacts of the demo model, made once by the command line and kept."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.environments import peer_variables
from bench.folders import REPOSITORY, BenchError, calibration_text, work_folder
from bench.measure import Run, run

LIMIT_S = 3600
# Name, method, bits; in the order of size, largest first.
ARTIFACTS = {
    "F16": ("gguf", "F16"),
    "Q6_K": ("gguf", "Q6_K"),
    "ctranslate2 int8": ("ctranslate2", "int8"),
    "gptq 4": ("gptq", "4"),
    "awq 4": ("awq", "4"),
    "nf4": ("nf4", "4"),
    "Q4_K_M": ("gguf", "Q4_K_M"),
}


def folder() -> Path:
    """Where they lie."""
    found = work_folder() / "judge"
    found.mkdir(parents=True, exist_ok=True)
    return found


def quantkit_command() -> str:
    """The command line of this environment."""
    return str(Path(sys.executable).parent / "quantkit")


def told(what: str, command: list[str], threads: int) -> Run:
    """Say what is run, run it without network; raises BenchError with the reason where it fails."""
    print(what, flush=True)
    variables = peer_variables(threads) | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = run(command, variables, folder() / "last.log", LIMIT_S, REPOSITORY)
    if done.code != 0:
        raise BenchError(f"{what}: {done.reason}")
    return done


def artifact(name: str, threads: int) -> str:
    """The folder of one of `ARTIFACTS`, made where it is missing."""
    method, bits = ARTIFACTS[name]
    found = folder() / f"{method}-{bits}"
    if not (found / "quantkit.json").is_file():
        command = [quantkit_command(), "convert", "demo", "--method", method, "--bits", bits, "--out", str(found)]
        if method in ("gptq", "awq"):
            command += ["--calibration-text", str(calibration_text())]
        told(f"convert {name}", command, threads)
    return str(found)
