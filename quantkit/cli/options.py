"""What the commands share: arguments, options, the console, how an artifact is shown and a result saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

out = Console()

ModelArgument = Annotated[str, typer.Argument(help="Hub id, checkpoint folder, or 'demo' (a 135M model).")]
SubjectArgument = Annotated[str, typer.Argument(help="Artifact folder, or a model to judge unquantized.")]


def _json_path(path: Path | None) -> Path | None:
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {path} does not exist; make it first")
    return path


JsonOption = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, callback=_json_path, help="Write the result as JSON to this file."),
]
RevisionOption = Annotated[str | None, typer.Option(help="Revision of a hub model.")]
TextOption = Annotated[
    str | None, typer.Option(help="UTF-8 text file. Default: WikiText-2 test, or the bundled sample without the hub.")
]
ProtocolOption = Annotated[str, typer.Option(help="Perplexity protocol: llama.cpp, papers or lm-eval.")]
ContextOption = Annotated[
    int | None,
    typer.Option("--n-ctx", help="Tokens in a window. Default: 512 (llama.cpp), 2048 (papers), the model's (lm-eval)."),
]
LimitOption = Annotated[
    int | None, typer.Option(help="Number of windows, for lm-eval of pages. Default: all of the text.")
]
DivergenceOption = Annotated[
    bool, typer.Option("--divergence/--no-divergence", help="Measure the divergence from the source model, too.")
]
SourceOption = Annotated[
    str | None, typer.Option("--source", help="The model that the artifact was made from, where it is not found.")
]
ThreadsOption = Annotated[
    str | None, typer.Option(help="Thread counts for ms/token, such as 1,2. Default: 1 and all cores.")
]
EngineOption = Annotated[str | None, typer.Option(help="Engine. Default: the one that users of the format run.")]
CardOption = Annotated[bool, typer.Option("--card", help="Also put the result into the artifact's README.md.")]
DtypeOption = Annotated[str | None, typer.Option(help="Type to compute in, for engines with a choice.")]
PythonOption = Annotated[
    str | None, typer.Option("--python", help="Interpreter of the environment that has the engine. Default: this one.")
]
DeviceOption = Annotated[str, typer.Option(help="cpu, or cuda where the engine has it.")]
PriceOption = Annotated[
    float | None, typer.Option("--price-per-hour", help="Of the machine, in any currency: adds the cost of tokens.")
]
CalibrationText = Annotated[
    str | None,
    typer.Option("--calibration-text", help="UTF-8 text file. Default: WikiText-2 train, or the bundled sample."),
]
Sequences = Annotated[int, typer.Option("--calibration-sequences", help="Number of calibration sequences.")]
Length = Annotated[int, typer.Option("--calibration-length", help="Tokens in a calibration sequence.")]
SeedOption = Annotated[int, typer.Option(help="Seed that draws the calibration sequences.")]


def thread_counts(threads: str | None) -> tuple[int, ...]:
    """``1,2`` as numbers."""
    try:
        return tuple(int(part) for part in threads.split(",")) if threads else ()
    except ValueError:
        raise typer.BadParameter(f"--threads {threads}: give whole numbers, such as 1,2") from None


def save(path: Path | None, text: str) -> None:
    """Write a result where that was asked for."""
    if path is not None:
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


def print_artifact(artifact: Any) -> None:
    """Print what an artifact is: recipe, size, types, errors of its weights, notes."""
    from quantkit.report.table import megabytes

    m = artifact.manifest
    out.print(f"{artifact.folder}: {m.recipe.label} of {m.source.model}", highlight=False)
    out.print(f"  {megabytes(m.weight_bytes)}, {m.bits_per_weight:.2f} bits per weight", highlight=False)
    out.print(f"  tensors: {', '.join(f'{n} {t}' for t, n in m.tensor_types.items())}", highlight=False)
    if m.weight_error:
        e = m.weight_error
        out.print(
            f"  relative weight error: mean {e.mean:.4f}, worst {e.worst:.4f} ({e.worst_tensor})", highlight=False
        )
    for note in m.notes:
        out.print(f"  note: {note}", highlight=False, soft_wrap=True)
