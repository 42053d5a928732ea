"""Options for automatic bits (`auto`): validation of targets, and a recipe that reproduces the choice."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import yaml

from quantkit.contracts.method import Job
from quantkit.contracts.run import Run
from quantkit.errors import RecipeError

AUTO = "auto"


def as_table(value: object) -> object:
    """Parse ``down_proj=8,o_proj=4`` into a dict from pattern to bits; return other values unchanged."""
    if not isinstance(value, str):
        return value
    pairs = [part.rpartition("=") for part in value.split(",") if part.strip()]
    return {pattern.strip(): given.strip() for pattern, _, given in pairs}


def given_target(job: Job, targets: Collection[str], decided: Collection[str], what: str) -> str | None:
    """Return which option of `targets` is set, or None; `decided` are the options that set `what` by hand.

    Raises RecipeError for contradictory options, or for bits `auto` without a target.
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
    """Write recipe.yaml, which reproduces the run with the `chosen` option values, without local paths."""
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
