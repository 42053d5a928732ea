"""The command line: parse, call, print. No logic of its own."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as Grid

from quantkit.cli import bench as cli_bench
from quantkit.cli import evaluate as cli_evaluate
from quantkit.cli import inspect as cli_gguf
from quantkit.cli import serve as cli_serve
from quantkit.cli.convert import ANY_OPTION, ConvertCommand, convert
from quantkit.cli.options import (
    CalibrationText,
    ContextOption,
    JsonOption,
    Length,
    LimitOption,
    ModelArgument,
    PriceOption,
    ProtocolOption,
    RevisionOption,
    SeedOption,
    Sequences,
    TextOption,
    ThreadsOption,
    out,
    print_artifact,
    save,
    thread_counts,
)
from quantkit.errors import QuantkitError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Quantize Hugging Face language models to GPTQ, AWQ, NF4, CTranslate2 and GGUF, and measure the result.",
)
app.command(cls=ConvertCommand, context_settings=ANY_OPTION)(convert)
app.command("eval-ppl")(cli_evaluate.eval_ppl)
app.command("eval")(cli_evaluate.evaluate_all)
err = Console(stderr=True)


@app.command()
def compare(
    model: ModelArgument,
    methods: Annotated[
        str | None, typer.Option(help="METHOD or METHOD:BITS, comma-separated. Default: all families.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Output folder. Default: quantkit-compare/MODEL.")
    ] = None,
    text: TextOption = None,
    protocol: ProtocolOption = "llama.cpp",
    n_ctx: ContextOption = None,
    limit: LimitOption = None,
    threads: ThreadsOption = None,
    price_per_hour: PriceOption = None,
    calibration_text: CalibrationText = None,
    calibration_sequences: Sequences = 64,
    calibration_length: Length = 512,
    seed: SeedOption = 0,
    revision: RevisionOption = None,
    json: JsonOption = None,
) -> None:
    """Convert MODEL with every method, judge all by one ruler, print one table."""
    from quantkit.progress import shown
    from quantkit.sweep import compare as comparison

    with shown() as progress:
        table = comparison.compare(
            model,
            methods.split(",") if methods else comparison.DEFAULT_VARIANTS,
            calibration={"text": calibration_text, "sequences": calibration_sequences, "length": calibration_length},
            evaluation={
                "text": text, "protocol": protocol, "n_ctx": n_ctx, "limit": limit, "threads": thread_counts(threads),
                "price_per_hour": price_per_hour,
            },
            out=folder,
            revision=revision,
            seed=seed,
            progress=progress,
        )  # fmt: skip
    save(json, table.to_json())
    table.show(out)


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe; one with `variants` compares, others convert.")],
    folder: Annotated[Path | None, typer.Option("--out", help="Output folder. Default: the recipe's.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing artifact.")] = False,
    json: JsonOption = None,
) -> None:
    """Carry out a recipe file."""
    from quantkit.conversion.check import prepare
    from quantkit.conversion.convert import run as run_conversion
    from quantkit.progress import shown
    from quantkit.recipe import CompareRecipe, ConvertRecipe, load_recipe
    from quantkit.sweep import compare as comparison

    asked = load_recipe(recipe)
    if folder is not None:
        asked = asked.model_copy(update={"out": str(folder)})
    with shown() as progress:
        if isinstance(asked, CompareRecipe):
            table = comparison.run(asked, progress)
            result: Callable[[], None] = lambda: table.show(out)  # noqa: E731
            text = table.to_json()
        else:
            plain = ConvertRecipe.model_validate(asked.model_dump(exclude={"out"}))
            artifact = run_conversion(prepare(plain), asked.out, force=force, progress=progress)
            result = lambda: print_artifact(artifact)  # noqa: E731
            text = artifact.manifest.model_dump_json(indent=2)
    save(json, text)
    result()


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Artifact folder, or a GGUF file of any tool.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="Of a GGUF file, also list every tensor.")] = False,
    json: JsonOption = None,
) -> None:
    """Show what an artifact is: recipe, size, types, notes; of a GGUF file, its keys, types and tensors."""
    from quantkit.artifact import MANIFEST, open_artifact

    if path.is_file() and path.name != MANIFEST:
        cli_gguf.show(path, tensors, json)
        return
    artifact = open_artifact(path)
    save(json, artifact.manifest.model_dump_json(indent=2))
    print_artifact(artifact)
    for name, entry in artifact.manifest.files.items():
        out.print(f"  {entry.bytes:>12,} bytes  {name}", highlight=False)


@app.command()
def verify(path: Annotated[Path, typer.Argument(help="Artifact folder.")], json: JsonOption = None) -> None:
    """Recompute every hash of an artifact and read its tensors back."""
    from quantkit.conversion.verify import verify as verify_artifact
    from quantkit.progress import shown

    with shown() as progress:
        artifact = verify_artifact(path, progress)
    save(json, artifact.manifest.model_dump_json(indent=2))
    out.print(
        f"{path}: {len(artifact.manifest.files)} files as written, all tensors finite", highlight=False, soft_wrap=True
    )
    if added := artifact.added_files():
        text = f"  note: not in the manifest, and so not checked: {', '.join(added)}"
        out.print(text, highlight=False, markup=False, soft_wrap=True)


@app.command()
def methods(json: JsonOption = None) -> None:
    """List the methods with their bits and options."""
    import json as json_module

    from quantkit.contracts import registry

    grid = Grid("method", "bits", "what it is", "engines", "source")
    plain = {}
    for method in registry.methods().values():
        grid.add_row(method.name, ", ".join(method.bits), method.summary, ", ".join(method.engines), method.reference)
        plain[method.name] = {
            "bits": method.bits,
            "default_bits": method.default_bits,
            "summary": method.summary,
            "engines": method.engines,
            "options": {
                name: field.get_default(call_default_factory=True)
                for name, field in method.Options.model_fields.items()
            },
        }
    save(json, json_module.dumps(plain, indent=2))
    out.print(grid)
    out.print("The options of each method: quantkit convert --help", highlight=False)


app.command("eval-tasks")(cli_evaluate.eval_tasks)
app.command()(cli_evaluate.cache)
app.command()(cli_bench.bench)
app.command()(cli_serve.serve)
app.command()(cli_gguf.imatrix)
app.command("import")(cli_gguf.import_file)


def _quiet() -> None:
    """Keep libraries' own bars and advice off the screen; the process is ours here."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def main() -> None:
    """Entry of the command `quantkit`: 0 done, 1 a QuantkitError, 2 usage, 130 interrupted."""
    _quiet()
    # A polite kill cleans up like Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app()
    except QuantkitError as error:
        err.print(f"[red]error:[/red] {type(error).__name__}: ", end="")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        err.print(f"error: {error.strerror or error}{where}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
