"""The commands for several artifacts: `compare`, `run`, `status`, `table` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from quantkit.cli import options
from quantkit.cli.options import WINDOWS, Fields, TableOptions, Values, print_artifact, save, say, writable
from quantkit.cli.progress import progress_bars, progress_with_table
from quantkit.errors import RecipeError, SweepError
from quantkit.records.recipe import (
    DEVICE,
    CompareRecipe,
    ConvertRecipe,
    ConvertRun,
    EvaluationSpec,
    ResourceSpec,
    SweepRecipe,
    load_recipe,
    parse,
)
from quantkit.system.sizes import parse_size
from quantkit.system.threads import end_with_parent


def compare(
    model: options.Model,
    *,
    adapter: options.Adapters = None,
    methods: Annotated[str | None, Option(help="METHOD or METHOD:BITS, comma-separated. Default: all.")] = None,
    folder: Annotated[Path | None, Option("--out", help="Output folder. Default: quantkit-compare/MODEL.")] = None,
    evaluation: Annotated[Values, Fields(EvaluationSpec, (*WINDOWS, "threads", "price_per_hour"))],
    calibration: options.Calibration,
    recipe: Annotated[Values, Fields(CompareRecipe, ("seed", "revision", "device"))],
    shown: TableOptions,
) -> None:
    """Convert MODEL with every method, evaluate all copies alike, and print one table."""
    from quantkit.comparison.compare import DEFAULT_VARIANTS

    values = {
        "model": model,
        "adapters": tuple(adapter or ()),
        "variants": tuple(methods.split(",")) if methods else DEFAULT_VARIANTS,
        "out": None if folder is None else str(folder),
        "evaluation": evaluation,
        "calibration": calibration,
        **recipe,
    }
    _compare(parse(CompareRecipe, values, "compare"), shown)


def _compare(recipe: CompareRecipe, shown: TableOptions) -> None:
    from quantkit.comparison.compare import run_comparison

    with progress_with_table(shown.transpose) as (progress, row):
        table = run_comparison(recipe, progress, row)
    shown.show(table)


def run(
    recipe: Annotated[
        Path, Argument(help="YAML recipe: with `models` a sweep, with `variants` a comparison, else one conversion.")
    ],
    *,
    folder: Annotated[Path | None, Option("--out", help="Output folder. Default: the recipe's.")] = None,
    executor: Annotated[Literal["local", "ray"], Option(help="For sweeps: local, or ray for a Ray cluster.")] = "local",
    address: Annotated[str, Option(help="For sweeps: address of the Ray cluster.")] = "auto",
    processes: Annotated[int, Option(min=1, max=1024, help="For sweeps: tasks at a time on this machine.")] = 1,
    device: Annotated[str | None, Option(help=f"{DEVICE}. Default: the recipe's, or auto.")] = None,
    force: options.Force = False,
    shown: TableOptions,
) -> None:
    """Run a recipe file."""
    loaded = load_recipe(recipe)
    if folder is not None:
        loaded = loaded.model_copy(update={"out": str(folder)})
    if device is not None:
        loaded = loaded.model_copy(update={"device": device})
    if isinstance(loaded, SweepRecipe):
        _sweep(loaded, address if executor == "ray" else None, processes, shown)
    elif processes > 1 or executor != "local":
        raise RecipeError(f"--executor and --processes are for recipes with `models`; {recipe} has none")
    elif isinstance(loaded, CompareRecipe):
        _compare(loaded, shown)
    else:
        _convert(loaded, force, shown.json)


def _convert(recipe: ConvertRun, force: bool, json: Path | None) -> None:
    from quantkit.conversion.check import check, prepare
    from quantkit.conversion.convert import run

    asked = ConvertRecipe.model_validate(recipe.model_dump(exclude={"out", "device"}))
    ready = check(prepare(asked, resources=ResourceSpec(device=recipe.device)), recipe.out, force)
    with progress_bars() as progress:
        artifact = run(ready, progress)
    save(json, artifact.manifest)
    print_artifact(artifact)


def _sweep(recipe: SweepRecipe, ray: str | None, processes: int, shown: TableOptions) -> None:
    """Run a sweep in `processes` local processes, or on the Ray cluster at the address `ray`."""
    from quantkit.comparison.executors import Local, OnRay
    from quantkit.comparison.sweep import run_sweep

    executor = Local(processes) if ray is None else OnRay(ray, max([1, *recipe.evaluation.threads]))
    with progress_bars() as progress:
        outcome = run_sweep(recipe, executor, progress)
    if outcome.sheet is not None:
        shown.show(outcome.sheet)
    if failed := [f"{name}: {why}" for name, why in outcome.failed.items()]:
        raise SweepError(f"{len(failed)} tasks failed: {'; '.join(failed)}")


def sweep_task(folder: Annotated[Path, Argument(help="The task's folder.")]) -> None:
    """Run one task of a sweep."""
    from quantkit.comparison.tasks import run_task

    end_with_parent()
    with progress_bars() as progress:
        run_task(folder, progress)


def status(folder: Annotated[Path, Argument(help="The output folder of a sweep.")]) -> None:
    """Show the status, run time and peak memory of a sweep's tasks."""
    from quantkit.comparison.tasks import read_tasks

    for task in read_tasks(folder):
        say(task.status())


TablePaths = Annotated[
    list[str],
    Argument(
        metavar="[LABEL=]PATH ...",
        help="Comparison folders, table.json files or reports; LABEL names the machine.",
    ),
]


def table(
    places: TablePaths,
    *,
    folder: Annotated[Path | None, Option("--out", help="Folder for table.md, .csv, .json and the plot.")] = None,
    shown: TableOptions,
) -> None:
    """Join the reports of several models and machines into one table."""
    from quantkit.report.plot import draw
    from quantkit.report.table import join_tables, read_places, write_table

    sheet = join_tables(read_places(places))
    if folder is not None:
        write_table(sheet, folder)
        draw(sheet, folder)
    shown.show(sheet)


def report(
    places: TablePaths,
    *,
    page: Annotated[Path, Option("--out", dir_okay=False, callback=writable(".html"), help="Page to write.")] = Path(
        "report.html"
    ),
    max_kld: Annotated[float, Option(min=0, help="Recommend the smallest copy within this KLD, in nats.")] = 0.1,
    max_size: Annotated[
        str | None, Option(help="Recommend the best copy within this size, such as 90MB. Default: 1/3 of float16.")
    ] = None,
    json: options.Json = None,
) -> None:
    """Write the reports as one self-contained HTML page."""
    from quantkit.contracts.registry import server_of
    from quantkit.report.page import find_artifacts
    from quantkit.report.page import page as rendered
    from quantkit.report.table import join_tables, read_places

    max_bytes = None if max_size is None else parse_size(max_size, "--max-size")
    sheet = join_tables(read_places(places))
    artifacts, remarks = find_artifacts(places)
    text = rendered(sheet, artifacts, remarks, max_kld, max_bytes, server_of)
    save(page, text)
    save(json, sheet.to_json())
    number = len(sheet.models)
    say(f"{page}: {number} model{'s' if number > 1 else ''}, {len(text.encode()) / 1e3:.0f} kB")
