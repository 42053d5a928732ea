"""convert: recipe -> source -> check -> write into `OUT.partial` -> read back -> manifest -> rename.

A conversion that was killed or interrupted resumes where it stopped: see staging.py and checkpoints/spool.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from quantkit.checkpoints.spool import JOURNAL, SPOOL, restore
from quantkit.contracts.method import CheckedJob, with_layer_bits
from quantkit.contracts.run import Findings, Run
from quantkit.conversion.check import ReadyJob, alternatives_to, check, prepare
from quantkit.conversion.manifest import fingerprint, make_manifest
from quantkit.conversion.staging import place_of, refuse_existing, staged
from quantkit.conversion.verify import check_values, notes_on_loss
from quantkit.errors import RecipeError, SourceError, UnsupportedError, ValuesError
from quantkit.models.source import refuse_non_finite
from quantkit.records.artifact import MANIFEST, Artifact, Manifest, open_artifact
from quantkit.records.recipe import CalibrationSpec, ConvertRecipe, ResourceSpec, parse, take_fields
from quantkit.report.card import MethodText, add_card, inherited_metadata, render
from quantkit.system.device import device_label
from quantkit.system.files import replace_text, temporary_folder
from quantkit.system.progress import Progress
from quantkit.system.untrusted import parse_json, reraise_as, shown

DTYPES = ("float16", "bfloat16", "float32")  # of an imported GGUF file
OF_A_RANK = ("device", "batch_tokens")  # keys of a fingerprint that may differ between ranks


def convert(
    model: str | Path,
    method: str,
    bits: str | int | None = None,
    out: str | Path | None = None,
    *,
    calibration: CalibrationSpec | dict[str, Any] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Artifact:
    """Quantize `model` (a hub id, a checkpoint folder, or ``demo``) and return the finished artifact.

    `bits`: in the method's own spelling (4, ``int8``, ``Q4_K_M``). `out`: the artifact's folder (default: a name made
    from the recipe); `force` allows replacing an artifact there. `settings`: the method's options, and these fields:

    - `format` to write, one that the method can write (default: its first);
    - `revision` of a hub model; `adapters`, folders of LoRA adapters to merge in float32, in this order; `seed`;
    - `device` of calibration: auto (the GPU if torch has one), cpu, cuda, cuda:1;
    - `offload_gb`: larger activations go to a file (default: 0.02 on the CPU, a quarter of a GPU's memory);
    - `max_memory_gb`: refuse a conversion with a larger memory forecast (default: the free memory).

    Raises a QuantkitError before any long work if the conversion cannot succeed; it leaves no files then.
    An interrupted conversion continues from `OUT.partial` when it is called again.
    """
    recipe, resources = recipe_of(model, method, bits, calibration, settings)
    return run(check(prepare(recipe, resources=resources), out, force), progress)


def recipe_of(
    model: str | Path,
    method: str,
    bits: str | int | None,
    calibration: CalibrationSpec | dict[str, Any] | None,
    settings: dict[str, Any],
) -> tuple[ConvertRecipe, ResourceSpec]:
    """Return the arguments of `convert` as a recipe and resource limits; raises RecipeError."""
    options = dict(settings)
    resources = parse(ResourceSpec, take_fields(options, ResourceSpec), "convert")
    values = take_fields(options, ConvertRecipe, ("format", "revision", "adapters", "seed"))
    if "adapters" in values:
        values["adapters"] = tuple(map(str, values["adapters"]))
    values |= {"model": str(model), "method": method, "bits": None if bits is None else str(bits), "options": options}
    values["calibration"] = parse(CalibrationSpec, calibration or {}, "calibration")
    return parse(ConvertRecipe, values, "convert"), resources


def run(ready: ReadyJob, progress: Progress | None = None) -> Artifact:
    """Run a checked job and return the artifact; see `convert`."""
    progress, job = progress or Progress(), ready.job
    if job.calibration is not None:
        progress.say(f"device: {device_label(job.device)}")
    values = fingerprint(job)
    with staged(ready.out, ready.force, values, progress.say) as folder:
        unfinished = not (folder / MANIFEST).is_file()
        job.shards.from_leader((values, unfinished))
        if unfinished:
            _make(job, folder, progress)
    return open_artifact(ready.out)


def follow(ready: ReadyJob) -> None:
    """Run this process's share of a conversion that the first process leads; its temporary files are deleted.

    Raises RecipeError if the first process runs another conversion, RankError if it ends.
    """
    own: dict[str, Any] = fingerprint(ready.job)
    leaders, unfinished = ready.job.shards.from_leader((own, False))
    differing = [key for key in {**own, **leaders} if own.get(key) != leaders.get(key) and key not in OF_A_RANK]
    if differing:
        raise RecipeError(
            f"process {ready.job.shards.rank} has a different conversion than the first process: they differ in "
            f"{', '.join(differing)}. Start all with the same command, code and files."
        )
    if unfinished:
        parent = ready.out.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(parent) as folder:
            ours = Run(folder)
            ready.job.method.write(with_layer_bits(ready.job, ours), ours)


def import_gguf(
    path: Path,
    out: Path,
    *,
    dtype: str = "float16",
    tokenizer: Path | None = None,
    config: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Convert the GGUF file `path` (of a split model: the first file) to a checkpoint folder, and return `out`.

    dtype float32 stores the file's values exactly; float16 and bfloat16 round them. `tokenizer` (a folder) and `config`
    (a config.json) replace the file's own. Raises ArtifactError for an unreadable file, UnsupportedError for values
    beyond the range of `dtype` or if configuration or tokenizer cannot be reproduced exactly.
    """
    from quantkit.formats.gguf.checkpoint import GgufCheckpoint

    if dtype not in DTYPES:
        raise RecipeError(f"unknown dtype {dtype!r}. Known: {', '.join(DTYPES)}.")
    refuse_existing(place_of(out), force)
    recipe = parse(ConvertRecipe, {"model": str(path), "method": "float", "bits": dtype}, "import")
    return run(check(prepare(recipe, GgufCheckpoint(path, tokenizer, config)), out, force), progress).folder


def _make(job: CheckedJob, folder: Path, progress: Progress) -> None:
    """Write the artifact into `folder`, read it back, and write the manifest last."""
    findings = _restored(folder)
    inherited = inherited_metadata(job.source.folder)
    text = MethodText(job.method.summary, job.method.reference, job.format.usage, job.format.library)
    _refuse_unwritable(job, folder, text, inherited)
    if findings is None and not job.source.proven_finite:
        with progress.step("reading the source", job.source.parameters) as advance:
            refuse_non_finite(job.source, advance)
    job.source.copy_side_files(folder)  # first, so that a method may change one of them
    current = Run(folder, progress, findings or Findings())
    if job.shards.size > 1:
        current.findings.note(f"{job.shards.size} processes shared the work; bytes depend on their number", "processes")
    try:
        job = with_layer_bits(job, current)
        job.method.write(job, current)
    except ValuesError:
        raise
    except UnsupportedError as error:
        hint = alternatives_to(job, job.method.name, job.method.calibrated(job.options))
        raise UnsupportedError(f"{str(error).rstrip('.')}. {hint}") from error
    manifest = make_manifest(job, current)
    weight_error = check_values(job, Artifact(folder, manifest), progress)
    notes = (*manifest.notes, *notes_on_loss(job.bits, weight_error))
    manifest = manifest.model_copy(update={"weight_error": weight_error, "notes": notes})
    manifest = add_card(folder, manifest, text, inherited)
    replace_text(folder / MANIFEST, manifest.to_text())


def _restored(folder: Path) -> Findings | None:
    """Return the findings of an interrupted run in `folder`; None if it has no usable finished blocks."""
    state = restore(folder)
    if state is None:
        return None
    try:
        return TypeAdapter(Findings).validate_python(state)
    except ValidationError:
        for name in (JOURNAL, SPOOL):
            (folder / name).unlink()
        return None


def _refuse_unwritable(job: CheckedJob, folder: Path, text: MethodText, inherited: dict[str, Any]) -> None:
    """Raise SourceError if the source's names or settings would make the manifest or model card unwritable."""
    with reraise_as(f"quantkit cannot write a manifest and card for {shown(job.source.name)}", SourceError):
        draft = make_manifest(job, Run(folder)).model_copy(update={"weight_files": ("weights",)})
        render(draft, text, inherited).encode()
        parse(Manifest, parse_json(draft.to_text(), "the manifest", SourceError), "the manifest")
