"""The commands that look: `quantkit inspect`, `verify`, `methods`; and those of GGUF files, `imatrix` and `import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from quantkit.cli.options import (
    AdapterOption,
    CalibrationFields,
    Fields,
    ForceOption,
    JsonOption,
    ModelArgument,
    RevisionOption,
    Values,
    out,
    print_artifact,
    save,
    say,
)
from quantkit.errors import one_line
from quantkit.recipe import CalibrationSpec, ConvertRecipe, ModelRef, ResourceSpec, parse

WIDEST = 200  # characters of a key's value that are shown


def inspect(
    path: Annotated[Path, typer.Argument(help="Artifact folder, or a GGUF file of any tool.")],
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="Of a GGUF file, also list every tensor.")] = False,
    json: JsonOption = None,
) -> None:
    """Show what an artifact is: recipe, size, types, notes; of a GGUF file, its keys, types and tensors."""
    from quantkit.artifact import MANIFEST, open_artifact

    if path.is_file() and path.name != MANIFEST:
        _print_gguf(path, tensors, json)
        return
    artifact = open_artifact(path)
    save(json, artifact.manifest.model_dump_json(indent=2))
    print_artifact(artifact)
    for name, entry in artifact.manifest.files.items():
        say(f"  {entry.bytes:>12,} bytes  {name}")


def _print_gguf(path: Path, tensors: bool, json: Path | None) -> None:
    """Print what is in a GGUF file: keys, types, bits per weight, and with `tensors` each of them."""
    import json as json_module

    from quantkit.formats.gguf.header import contents_of

    contents = contents_of(path)
    save(json, json_module.dumps(contents.to_values(), indent=2, default=str))
    for key, value in contents.keys.items():
        text = repr(value)
        shown = text if len(text) <= WIDEST else f"{text[:WIDEST]}... ({len(text)} characters)"
        say(f"{key} = {shown}")
    grid = Table("type", "tensors", "weights", "MB", "bits per weight")
    for name, share in contents.shares().items():
        bits = 8 * share.nbytes / max(1, share.weights)
        grid.add_row(name, str(share.tensors), f"{share.weights:,}", f"{share.nbytes / 1e6:.1f}", f"{bits:.2f}")
    out.print(grid)
    if tensors:
        grid = Table("tensor", "type", "shape", "MB")
        for tensor in contents.tensors:
            shape = " x ".join(map(str, tensor.shape))
            grid.add_row(escape(one_line(tensor.name, WIDEST)), tensor.type, shape, f"{tensor.nbytes / 1e6:.2f}")
        out.print(grid)
    say(
        f"{contents.weights:,} weights, {contents.bits_per_weight:.2f} bits per weight; without keys and tokenizer "
        f"{contents.tensor_bits_per_weight:.2f}, which llama.cpp calls BPW"
    )


def verify(path: Annotated[Path, typer.Argument(help="Artifact folder.")], *, json: JsonOption = None) -> None:
    """Recompute every hash of an artifact and read its tensors back."""
    from quantkit.artifact import open_artifact
    from quantkit.cli.progress import shown
    from quantkit.conversion.verify import needs_torch
    from quantkit.conversion.verify import verify as verify_artifact
    from quantkit.models.config import leave_torch_out

    artifact = open_artifact(path)
    if not needs_torch(artifact):
        leave_torch_out()  # this process verifies and ends
    with shown() as progress:
        verify_artifact(artifact, progress)
    save(json, artifact.manifest.model_dump_json(indent=2))
    say(f"{path}: {len(artifact.manifest.files)} files as written, all tensors finite")
    if added := artifact.added_files():
        text = f"  note: not in the manifest, and so not checked: {', '.join(added)}"
        say(text)


def methods(*, json: JsonOption = None) -> None:
    """List the methods with their bits and options, and what loads the files that they become."""
    import json as json_module

    from quantkit.contracts import registry
    from quantkit.serving.servers import what_loads

    grid = Table("method", "bits", "what it is", "formats", "source")
    values = {}
    for method in registry.methods().values():
        formats = registry.formats_for(method)
        grid.add_row(method.name, ", ".join(method.bits), method.summary, ", ".join(formats), method.reference)
        fields = method.Options.model_fields.items()
        values[method.name] = {
            "bits": method.bits,
            "default_bits": method.default_bits,
            "summary": method.summary,
            "formats": formats,
            "options": {name: field.get_default(call_default_factory=True) for name, field in fields},
        }
    save(json, json_module.dumps(values, indent=2))
    out.print(grid)
    loading = Table("format", "bits", "loaded by")
    for stored, kinds, programs in what_loads():
        names = (f"{name} ({remark})" if remark else name for name, (why, remark) in programs.items() if not why)
        loading.add_row(stored, kinds, ", ".join(names))
    out.print(loading)
    say("In brackets: the oldest version tried. Why not, and what else: docs/engines.md")
    say("The options of a method: quantkit convert --method METHOD --help")


def imatrix(
    model: ModelArgument,
    *,
    to: Annotated[Path, typer.Option("--out", help="The file to write, such as model.imatrix.gguf.")],
    adapter: AdapterOption = None,
    calibration: CalibrationFields,
    revision: RevisionOption = None,
    recipe: Annotated[Values, Fields(ConvertRecipe, ("seed",))],
    resources: Annotated[Values, Fields(ResourceSpec, ("device",))],
) -> None:
    """Measure MODEL's importance matrix and write it as llama.cpp's imatrix file."""
    from quantkit.cli.progress import shown
    from quantkit.methods.gguf.imatrix import make_imatrix

    with shown() as progress:
        spec = parse(CalibrationSpec, calibration, "calibration")
        ref = parse(ModelRef, {"model": model, "revision": revision, "adapters": tuple(adapter or ())}, "imatrix")
        count = make_imatrix(ref, to, calibration=spec, progress=progress, **recipe, **resources)
    say(f"{to}: importance of {count} weights")


def import_file(
    path: Annotated[Path, typer.Argument(help="A GGUF file; of a split model the first.", exists=True, dir_okay=False)],
    *,
    to: Annotated[Path, typer.Option("--out", help="Output folder.")],
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, or float32 (exact).")] = "float16",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the source's tokenizer, instead of the file's.", exists=True)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The source's config.json, instead of the file's keys.", exists=True)
    ] = None,
    force: ForceOption = False,
) -> None:
    """Write a GGUF file as a Hugging Face checkpoint, dequantized."""
    from quantkit.cli.progress import shown
    from quantkit.conversion.convert import import_gguf

    with shown() as progress:
        import_gguf(path, to, dtype=dtype, tokenizer=tokenizer, config=config, force=force, progress=progress)
    say(f"{to}: {path.name} as a checkpoint in {dtype}")
