"""The commands `inspect`, `verify` and `methods`, and for GGUF files `imatrix` and `import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from quantkit.cli import options
from quantkit.cli.options import Fields, Values, out, print_artifact, save, say
from quantkit.cli.progress import progress_bars
from quantkit.errors import one_line
from quantkit.records.artifact import MANIFEST, open_artifact
from quantkit.records.recipe import CalibrationSpec, ConvertRecipe, ModelRef, ResourceSpec, parse

WIDEST = 200  # characters of a key's value that are shown


def inspect(
    path: Annotated[Path, Argument(help="Artifact folder, or any GGUF file.")],
    *,
    tensors: Annotated[bool, Option("--tensors", help="For a GGUF file, also list every tensor.")] = False,
    json: options.Json = None,
) -> None:
    """Show an artifact's recipe, size, types and notes, or a GGUF file's keys, types and tensors."""
    if path.is_file() and path.name != MANIFEST:
        _print_gguf(path, tensors, json)
        return
    artifact = open_artifact(path)
    save(json, artifact.manifest)
    print_artifact(artifact)
    for name, entry in artifact.manifest.files.items():
        say(f"  {entry.bytes:>12,} bytes  {name}")


def _print_gguf(path: Path, tensors: bool, json: Path | None) -> None:
    """Print a GGUF file's keys, types and bits per weight, and if `tensors` is set every tensor."""
    from quantkit.formats.gguf.header import contents_of

    contents = contents_of(path)
    save(json, contents.to_values())
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
            grid.add_row(Text(one_line(tensor.name, WIDEST)), tensor.type, shape, f"{tensor.nbytes / 1e6:.2f}")
        out.print(grid)
    say(
        f"{contents.weights:,} weights, {contents.bits_per_weight:.2f} bits per weight; without keys and tokenizer "
        f"{contents.tensor_bits_per_weight:.2f}, which llama.cpp calls BPW"
    )


def verify(path: options.ArtifactFolder, *, json: options.Json = None) -> None:
    """Recompute every hash of an artifact and read its tensors back."""
    from quantkit.conversion.verify import needs_torch, verify
    from quantkit.system.modules import leave_torch_out

    artifact = open_artifact(path)
    if not needs_torch(artifact):
        leave_torch_out()  # this process verifies and ends
    with progress_bars() as progress:
        verify(artifact, progress)
    save(json, artifact.manifest)
    say(f"{path}: {len(artifact.manifest.files)} files as written, all tensors finite")
    if added := artifact.added_files():
        say(f"  note: not in the manifest, so not checked: {', '.join(added)}")


def methods(*, json: options.Json = None) -> None:
    """List the methods with their bits and options, and the engines that load each format."""
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
    save(json, values)
    out.print(grid)
    loading = Table("format", "bits", "loaded by")
    for stored, kinds, programs in what_loads():
        told = {name: "GPUs only" if how.gpus_only else how.tested for name, how in programs.items() if not how.refusal}
        names = (f"{name} ({remark})" if remark else name for name, remark in told.items())
        loading.add_row(stored, kinds, ", ".join(names))
    out.print(loading)
    say("In brackets: the oldest version tested. Details: docs/engines.md")
    say("The options of a method: quantkit convert --method METHOD --help")


def imatrix(
    model: options.Model,
    *,
    to: Annotated[Path, Option("--out", help="The file to write, such as model.imatrix.gguf.")],
    adapter: options.Adapters = None,
    calibration: options.Calibration,
    revision: options.Revision = None,
    recipe: Annotated[Values, Fields(ConvertRecipe, ("seed",))],
    resources: Annotated[Values, Fields(ResourceSpec, ("device",))],
) -> None:
    """Measure MODEL's importance matrix and write it as llama.cpp's imatrix file."""
    from quantkit.methods.gguf.imatrix import make_imatrix

    with progress_bars() as progress:
        spec = parse(CalibrationSpec, calibration, "calibration")
        ref = parse(ModelRef, {"model": model, "revision": revision, "adapters": tuple(adapter or ())}, "imatrix")
        count = make_imatrix(ref, to, calibration=spec, progress=progress, **recipe, **resources)
    say(f"{to}: importance of {count} weights")


def import_file(
    path: Annotated[Path, Argument(help="GGUF file; the first one of a split model.", exists=True, dir_okay=False)],
    *,
    to: Annotated[Path, Option("--out", help="Output folder.")],
    dtype: Annotated[str, Option(help="float16, bfloat16, or float32 (exact).")] = "float16",
    tokenizer: Annotated[
        Path | None, Option(help="Folder with a tokenizer to use instead of the file's.", exists=True)
    ] = None,
    config: Annotated[Path | None, Option(help="A config.json to use instead of the file's keys.", exists=True)] = None,
    force: options.Force = False,
) -> None:
    """Write a GGUF file as a Hugging Face checkpoint, dequantized."""
    from quantkit.conversion.convert import import_gguf

    with progress_bars() as progress:
        import_gguf(path, to, dtype=dtype, tokenizer=tokenizer, config=config, force=force, progress=progress)
    say(f"{to}: {path.name} as a checkpoint in {dtype}")
