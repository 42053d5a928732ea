"""Targets for bits `auto`, and a recipe that repeats the choice without measuring."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import yaml

from quantkit.contracts.method import Job
from quantkit.contracts.run import Run
from quantkit.errors import RecipeError

AUTO = "auto"


def as_table(value: object) -> object:
    """Return ``down_proj=8,o_proj=4`` as a mapping of patterns; other values unchanged."""
    if not isinstance(value, str):
        return value
    pairs = [part.rpartition("=") for part in value.split(",") if part.strip()]
    return {pattern.strip(): given.strip() for pattern, _, given in pairs}


def given_target(job: Job, targets: Collection[str], decided: Collection[str], what: str) -> str | None:
    """Return which of the options `targets` is given, or None; `decided` are options that fix `what` themselves.

    Raises RecipeError if options contradict each other, or bits `auto` come without a target.
    """
    given = [name for name in targets if getattr(job.options, name) is not None]
    by_hand = [name for name in decided if getattr(job.options, name)]
    if len(given) > 1:
        raise RecipeError(f"{' and '.join(given)} contradict each other. Give one of them.")
    if job.bits == AUTO and not given and not getattr(job.options, next(iter(decided))):
        *first, last = (f"--{name.replace('_', '-')}" for name in targets)
        raise RecipeError(f"bits auto needs {', '.join(first)} or {last} to choose {what} by.")
    if given and job.bits != AUTO:
        raise RecipeError(f"{given[0]} chooses the {what} itself: it needs --bits auto, not {job.bits}.")
    if given and by_hand:
        raise RecipeError(f"{by_hand[0]} and {given[0]} cannot both decide the {what}. Give one of them.")
    return given[0] if given else None


def write_recipe(job: Job, run: Run, chosen: Mapping[str, object]) -> None:
    """Write a recipe next to the files that repeats the choice `chosen` (by option), without paths of this machine."""
    options = {key: value for key, value in job.recipe.options.items() if not key.startswith("target_")}
    calibration = job.recipe.calibration
    text = Path(calibration.text).name if calibration.text is not None else None
    values = {
        "model": job.source.name,
        "method": job.method.name,
        "bits": job.bits,
        "options": {**options, **chosen},
        "calibration": {**calibration.model_dump(), "text": text},
        "seed": job.recipe.seed,
    }
    if job.recipe.format is not None:
        values["format"] = job.recipe.format
    (run.folder / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
