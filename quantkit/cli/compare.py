"""The commands for several things at once: `compare`, `run` for a recipe file, `table` for what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quantkit.cli.options import (
    WINDOWS,
    AdapterOption,
    CalibrationFields,
    Fields,
    ForceOption,
    JsonOption,
    ModelArgument,
    NotesOption,
    TransposeOption,
    Values,
    print_artifact,
    print_table,
    save,
    say,
    writable,
)
from quantkit.errors import RecipeError, SweepError
from quantkit.recipe import DEVICE, CompareRecipe, ConvertRecipe, EvaluationSpec, ResourceSpec, SweepRecipe, load_recipe

if TYPE_CHECKING:
    from quantkit.comparison.sweep import Outcome


def compare(
    model: ModelArgument,
    *,
    adapter: AdapterOption = None,
    methods: Annotated[
        str | None, typer.Option(help="METHOD or METHOD:BITS, comma-separated. Default: all families.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Output folder. Default: quantkit-compare/MODEL.")
    ] = None,
    evaluation: Annotated[Values, Fields(EvaluationSpec, (*WINDOWS, "threads", "price_per_hour"))],
    calibration: CalibrationFields,
    recipe: Annotated[Values, Fields(CompareRecipe, ("seed", "revision", "device"))],
    transpose: TransposeOption = None,
    notes: NotesOption = False,
    json: JsonOption = None,
) -> None:
    """Convert MODEL with every method, judge all by one ruler, print one table."""
    from quantkit.cli.progress import growing
    from quantkit.comparison import compare as comparison

    variants = methods.split(",") if methods else comparison.DEFAULT_VARIANTS
    with growing(transpose) as (progress, row):
        table = comparison.compare(
            model, variants, calibration=calibration, evaluation=evaluation, out=folder, progress=progress, row=row,
            adapters=adapter or (), **recipe,
        )  # fmt: skip
    save(json, table.to_json())
    print_table(table, transpose, notes)


def run(
    recipe: Annotated[
        Path,
        typer.Argument(help="YAML recipe: one with `models` sweeps, one with `variants` compares, others convert."),
    ],
    *,
    folder: Annotated[Path | None, typer.Option("--out", help="Output folder. Default: the recipe's.")] = None,
    executor: Annotated[
        Literal["local", "ray"], typer.Option(help="Of a sweep: local, or ray for the machines of a Ray cluster.")
    ] = "local",
    address: Annotated[str, typer.Option(help="Of a sweep: the Ray cluster's address.")] = "auto",
    processes: Annotated[int, typer.Option(min=1, max=1024, help="Of a sweep: tasks at a time on this machine.")] = 1,
    device: Annotated[str | None, typer.Option(help=f"{DEVICE}. Default: the recipe's, or auto.")] = None,
    force: ForceOption = False,
    transpose: TransposeOption = None,
    notes: NotesOption = False,
    json: JsonOption = None,
) -> None:
    """Carry out a recipe file."""
    from quantkit.cli.progress import growing
    from quantkit.cli.progress import shown as steps
    from quantkit.comparison import compare as comparison
    from quantkit.conversion.check import check, prepare
    from quantkit.conversion.convert import run as run_conversion

    loaded = load_recipe(recipe)
    if folder is not None:
        loaded = loaded.model_copy(update={"out": str(folder)})
    if device is not None:
        loaded = loaded.model_copy(update={"device": device})
    if isinstance(loaded, SweepRecipe):
        outcome = _sweep(loaded, address if executor == "ray" else None, processes)
        if outcome.sheet is not None:
            save(json, outcome.sheet.to_json())
            print_table(outcome.sheet, transpose, notes)
        if failed := [f"{name}: {why}" for name, why in outcome.failed.items()]:
            raise SweepError(f"{len(failed)} tasks failed: {'; '.join(failed)}")
        return
    if processes > 1 or executor != "local":
        raise RecipeError(f"--executor and --processes are for recipes with `models`; {recipe} has none")
    if isinstance(loaded, CompareRecipe):
        with growing(transpose) as (progress, row):
            table = comparison.run(loaded, progress, row)
        save(json, table.to_json())
        print_table(table, transpose, notes)
        return
    recipe_alone = ConvertRecipe.model_validate(loaded.model_dump(exclude={"out", "device"}))
    ready = check(prepare(recipe_alone, resources=ResourceSpec(device=loaded.device)), loaded.out, force)
    with steps() as progress:
        artifact = run_conversion(ready, progress)
    save(json, artifact.manifest.model_dump_json(indent=2))
    print_artifact(artifact)


def _sweep(recipe: SweepRecipe, ray: str | None, processes: int) -> Outcome:
    """Sweep with so many processes of this machine, or on the Ray cluster at an address."""
    from quantkit.cli.progress import shown as steps
    from quantkit.comparison.executors import Local, OnRay
    from quantkit.comparison.sweep import run as run_sweep

    executor = Local(processes) if ray is None else OnRay(ray, max([1, *recipe.evaluation.threads]))
    with steps() as progress:
        return run_sweep(recipe, executor, progress)


def sweep_task(folder: Annotated[Path, typer.Argument(help="The task's folder.")]) -> None:
    """Do one task of a sweep."""
    from quantkit.cli.progress import shown as steps
    from quantkit.comparison.tasks import run_task
    from quantkit.system.threads import end_with_parent

    end_with_parent()
    with steps() as progress:
        run_task(folder, progress)


def status(folder: Annotated[Path, typer.Argument(help="The output folder of a sweep.")]) -> None:
    """Say how far the tasks of a sweep are, how long they took and what memory."""
    from quantkit.comparison.tasks import read_tasks

    for task in read_tasks(folder):
        say(task.status())


PlacesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="[LABEL=]PATH ...",
        help="Folders of comparisons, their table.json, or reports; LABEL names the machine.",
    ),
]


def table(
    places: PlacesArgument,
    *,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Write table.md, .csv, .json and the picture there.")
    ] = None,
    transpose: TransposeOption = None,
    notes: NotesOption = False,
    json: JsonOption = None,
) -> None:
    """Put what was measured of several models and on several machines into one table."""
    from quantkit.comparison.compare import draw_table, write_table
    from quantkit.report.table import joined, read_places

    sheet = joined(read_places(places))
    if folder is not None:
        write_table(sheet, folder)
        draw_table(sheet, folder)
    save(json, sheet.to_json())
    print_table(sheet, transpose, notes)


def report(
    places: PlacesArgument,
    *,
    page: Annotated[
        Path, typer.Option("--out", dir_okay=False, callback=writable(".html"), help="The page to write.")
    ] = Path("report.html"),
    max_kld: Annotated[
        float, typer.Option(min=0, help="Name the smallest copy with at most this divergence, in nats.")
    ] = 0.1,
    max_size: Annotated[
        str | None, typer.Option(help="Name the best copy of at most this size, such as 90MB. Default: 1/3 of float16.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Write what was measured as one HTML page that needs nothing but itself."""
    from quantkit.report.page import find_artifacts
    from quantkit.report.page import page as rendered
    from quantkit.report.table import joined, read_places
    from quantkit.serving.servers import server_of
    from quantkit.system.sizes import parse_size

    max_bytes = None if max_size is None else parse_size(max_size, "--max-size")
    sheet = joined(read_places(places))
    artifacts, remarks = find_artifacts(places)
    text = rendered(sheet, artifacts, remarks, max_kld, max_bytes, server_of)
    save(page, text)
    save(json, sheet.to_json())
    number = len(sheet.models)
    say(f"{page}: {number} model{'s' if number > 1 else ''}, {len(text.encode()) / 1e3:.0f} kB")
