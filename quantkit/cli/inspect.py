"""What only GGUF files need: the commands `imatrix` and `import`, and what `inspect` shows of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table as Grid

from quantkit.cli.options import (
    CalibrationText,
    Length,
    ModelArgument,
    RevisionOption,
    SeedOption,
    Sequences,
    out,
    save,
)

WIDEST = 200  # characters of a key's value that are shown


def imatrix(
    model: ModelArgument,
    to: Annotated[Path, typer.Option("--out", help="The file to write, such as model.imatrix.gguf.")],
    calibration_text: CalibrationText = None,
    calibration_sequences: Sequences = 64,
    calibration_length: Length = 512,
    seed: SeedOption = 0,
    revision: RevisionOption = None,
) -> None:
    """Measure MODEL's importance matrix and write it as llama.cpp's imatrix file."""
    from quantkit.formats.gguf.imatrix import make_imatrix
    from quantkit.progress import shown
    from quantkit.recipe import CalibrationSpec, parse

    values = {"text": calibration_text, "sequences": calibration_sequences, "length": calibration_length}
    with shown() as progress:
        calibration = parse(CalibrationSpec, values, "calibration")
        count = make_imatrix(model, to, calibration=calibration, revision=revision, seed=seed, progress=progress)
    out.print(f"{to}: importance of {count} weights", highlight=False)


def show(path: Path, tensors: bool, json: Path | None) -> None:
    """Print what is in a GGUF file: keys, types, bits per weight, and with `tensors` each of them."""
    import json as json_module

    from quantkit.formats.gguf.contents import contents_of

    found = contents_of(path)
    save(json, json_module.dumps(found.to_values(), indent=2, default=str))
    for key, value in found.keys.items():
        text = repr(value)
        shown = text if len(text) <= WIDEST else f"{text[:WIDEST]}... ({len(text)} characters)"
        out.print(f"{escape(key)} = {escape(shown)}", highlight=False, soft_wrap=True)
    grid = Grid("type", "tensors", "weights", "MB", "bits per weight")
    for name, share in found.shares().items():
        bits = 8 * share.nbytes / max(1, share.weights)
        grid.add_row(name, str(share.tensors), f"{share.weights:,}", f"{share.nbytes / 1e6:.1f}", f"{bits:.2f}")
    out.print(grid)
    if tensors:
        grid = Grid("tensor", "type", "shape", "MB")
        for tensor in found.tensors:
            shape = " x ".join(map(str, tensor.shape))
            grid.add_row(escape(tensor.name), tensor.type, shape, f"{tensor.nbytes / 1e6:.2f}")
        out.print(grid)
    weights = sum(tensor.weights for tensor in found.tensors)
    out.print(f"{weights:,} weights, {found.bits_per_weight:.2f} bits per weight", highlight=False)


def import_file(
    path: Annotated[Path, typer.Argument(help="A GGUF file; of a split model the first.", exists=True, dir_okay=False)],
    to: Annotated[Path, typer.Option("--out", help="Output folder.")],
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, or float32 (exact).")] = "float16",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the source's tokenizer, instead of the file's.", exists=True)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The source's config.json, instead of the file's keys.", exists=True)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Write a GGUF file as a Hugging Face checkpoint, dequantized."""
    from quantkit.formats.gguf.importing import import_gguf
    from quantkit.progress import shown

    with shown() as progress:
        import_gguf(path, to, dtype=dtype, tokenizer=tokenizer, config=config, force=force, progress=progress)
    out.print(f"{to}: {path.name} as a checkpoint in {dtype}", highlight=False)
