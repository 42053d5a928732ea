"""Where the benchmark keeps things: the user's cache folder for what is reusable, `bench/results` for figures."""

from __future__ import annotations

import os
from pathlib import Path

from quantkit.system.files import cache_folder

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "bench" / "results"
SHARED_VARIABLE = "QUANTKIT_SHARED"


class BenchError(Exception):
    """Something that the person who runs the benchmark can change; told in one line."""


def kept(variable: str, name: str) -> Path:
    """The folder `name` in quantkit's cache, or the folder that the environment variable names."""
    return Path(os.environ.get(variable) or cache_folder() / name)


def environments_folder() -> Path:
    """Virtual environments of the peers."""
    return kept("QUANTKIT_BENCH_ENVS", "bench-envs")


def models_folder() -> Path:
    """The measured models."""
    return kept("QUANTKIT_BENCH_MODELS", "bench-models")


def work_folder() -> Path:
    """Artifacts, calibration tokens and hidden states: everything that can be made again."""
    return kept("QUANTKIT_BENCH_WORK", "bench-work")


def shared_file(name: str) -> Path:
    """A file of the shared data folder; raises BenchError that says how to name that folder."""
    folder = Path(os.environ.get(SHARED_VARIABLE) or REPOSITORY.parent / "shared")
    path = folder / "data" / name
    if not path.is_file():
        raise BenchError(f"{path} is missing. Set {SHARED_VARIABLE} to the folder that holds data/{name}.")
    return path


def calibration_text() -> Path:
    """The text that every tool is calibrated on."""
    return shared_file("wikitext2/wiki.train.first1MB.raw")


def evaluation_text() -> Path:
    """The text that every artifact is judged on."""
    return shared_file("wikitext2/wiki.test.raw")
