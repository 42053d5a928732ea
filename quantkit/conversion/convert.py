"""convert: recipe -> source -> check -> write into `OUT.partial` -> read back -> manifest -> rename.

A conversion that was killed or interrupted goes on where it was: see staging.py and checkpoints/spool.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from quantkit.artifact import MANIFEST, Artifact, Manifest, open_artifact
from quantkit.checkpoints.journal import JOURNAL, SPOOL, restore
from quantkit.contracts.method import Job
from quantkit.contracts.run import Findings, Run
from quantkit.conversion.alternatives import alternatives_to
from quantkit.conversion.check import CheckedJob, check, prepare_job
from quantkit.conversion.manifest import fingerprint, make_manifest
from quantkit.conversion.prove import check_values
from quantkit.conversion.staging import place_of, refuse_existing, refuse_overlap, staged
from quantkit.errors import RecipeError, SourceError, UnsupportedError, ValuesError
from quantkit.progress import Progress
from quantkit.recipe import CalibrationSpec, ConvertRecipe, ResourceSpec, parse
from quantkit.report.card import MethodText, add_card, inherited_metadata, render
from quantkit.system.device import described
from quantkit.system.files import replace_text, safe_name
from quantkit.system.temporary import temporary_folder
from quantkit.untrusted import parse_json, shown, told

OF_A_RANK = ("device", "batch_tokens")  # keys of a fingerprint that may differ between ranks


def convert(
    model_id: str,
    method: str,
    bits: str | int | None = None,
    out: str | Path | None = None,
    *,
    calibration: CalibrationSpec | dict[str, Any] | None = None,
    revision: str | None = None,
    adapters: Sequence[str | Path] = (),
    seed: int = 0,
    format: str | None = None,
    force: bool = False,
    device: str = "auto",
    offload_gb: float | None = None,
    max_memory_gb: float | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Artifact:
    """Quantize `model_id` (a hub id, a checkpoint folder, or ``demo``) and return the finished artifact.

    `bits` is said as the method's users say it (4, ``int8``, ``Q4_K_M``); `options` are the method's own; `format` is
    one of those that can hold what it makes (default: the method's first). `adapters` are folders of LoRA adapters,
    which are merged into the model in float32 in this order.
    Raises a QuantkitError, before any long work, for whatever can be known beforehand; nothing is left behind then.
    A conversion that was killed or interrupted goes on from `OUT.partial` when it is asked for again.
    Calibrated methods compute on `device`: auto (the GPU where torch has one), cpu, cuda, cuda:1. Activations of more
    than `offload_gb` GB go to a file (default: 0.02 on the CPU, a quarter of a GPU's memory).
    What is forecast to take more than `max_memory_gb` GB (default: what is free) is refused.
    """
    given = {"device": device, "offload_gb": offload_gb, "max_memory_gb": max_memory_gb}
    limits = parse(ResourceSpec, given, "convert")
    job = prepare_job(
        model_id, method, bits, calibration=calibration, revision=revision, adapters=adapters, seed=seed,
        format=format, device=device, offload_gb=limits.offload_gb, **options,
    )  # fmt: skip
    max_memory = None if limits.max_memory_gb is None else int(limits.max_memory_gb * 1e9)
    return run(job, out, force=force, max_memory=max_memory, progress=progress)


def default_out(recipe: ConvertRecipe) -> Path:
    """`MODEL-ADAPTERS-METHOD-BITS` in the current folder, followed by the options that were given."""
    names = [Path(place).name for place in (recipe.model, *recipe.adapters)]
    return Path(safe_name("-".join([names[0] or "model", *filter(None, names[1:]), recipe.label])))


def run(
    job: Job | CheckedJob,
    out: str | Path | None = None,
    *,
    force: bool = False,
    max_memory: int | None = None,
    progress: Progress | None = None,
) -> Artifact:
    """Carry out a prepared job, which is checked first where it is not yet; see `convert`."""
    progress = progress or Progress()
    checked = job.job if isinstance(job, CheckedJob) else job
    out = place_of(default_out(checked.recipe) if out is None else out)
    refuse_existing(out, force)
    refuse_own_source(checked, out)
    if checked is job:
        checked = check(job, out, max_memory).job
        if checked.calibration is not None:
            progress.say(f"device: {described(checked.device)}")
    values = fingerprint(checked)
    with staged(out, force, values, progress.say) as folder:
        unfinished = not (folder / MANIFEST).is_file()
        checked.shards.from_leader((values, unfinished))
        if unfinished:
            _make(checked, folder, progress)
    return open_artifact(out)


def follow(job: Job, out: str | Path | None = None, *, max_memory: int | None = None) -> None:
    """Do another rank's share of what the leader's `run` does; what it needs beside memory is there only meanwhile.

    Raises RecipeError where it is not the same conversion, RankError where the leader ends.
    """
    out = place_of(default_out(job.recipe) if out is None else out)
    checked = check(job, out, max_memory).job
    own: dict[str, Any] = fingerprint(checked)
    leaders, unfinished = checked.shards.from_leader((own, False))
    differing = [key for key in {**own, **leaders} if own.get(key) != leaders.get(key) and key not in OF_A_RANK]
    if differing:
        raise RecipeError(
            f"process {job.shards.rank} has another conversion than the first one: differing in "
            f"{', '.join(differing)}. Start all with the same command, code and files."
        )
    if unfinished:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(out.absolute().parent) as folder:
            ours = Run(folder)
            checked.method.write(checked.with_layer_bits(ours), ours)


def refuse_own_source(job: Job, out: Path) -> None:
    """Raise OutputError where the artifact would lie in its source's folder, or take its place."""
    folder = job.source.folder
    # A GGUF file lies among others; a checkpoint is all that its folder holds.
    is_checkpoint = "config.json" in job.source.hashed_files
    refuse_overlap(out, folder if is_checkpoint else folder / job.source.weight_files[0])


def _make(job: Job, folder: Path, progress: Progress) -> None:
    """Write the artifact into `folder`, prove it, and write the manifest last."""
    findings = _restored(folder)
    inherited = inherited_metadata(job.source.folder)
    text = MethodText(job.method.summary, job.method.reference, job.format.usage, job.format.library)
    _refuse_unwritable(job, folder, text, inherited)
    if findings is None and not job.source.proven_finite:
        with progress.step("reading the source", job.source.parameters) as advance:
            job.source.refuse_non_finite(lambda name, _: advance(job.source.info(name).parameters))
    job.source.copy_side_files(folder)  # first, so that a method may mend one of them
    current = Run(folder, progress, findings or Findings())
    if job.shards.size > 1:
        current.findings.note(f"{job.shards.size} processes shared the work; bytes depend on their number", "processes")
    try:
        job = job.with_layer_bits(current)
        job.method.write(job, current)
    except ValuesError:
        raise
    except UnsupportedError as error:
        hint = alternatives_to(job, job.method.name, job.method.calibrated(job.options))
        raise UnsupportedError(f"{str(error).rstrip('.')}. {hint}") from error
    manifest = make_manifest(job, current)
    weight_error = check_values(job, Artifact(folder, manifest), progress)
    manifest = add_card(folder, manifest.model_copy(update={"weight_error": weight_error}), text, inherited)
    replace_text(folder / MANIFEST, manifest.to_text())


def _restored(folder: Path) -> Findings | None:
    """What finished blocks in `folder` found out; None where there are none, or none that this version has written."""
    state = restore(folder)
    if state is None:
        return None
    try:
        return TypeAdapter(Findings).validate_python(state)
    except ValidationError:
        for name in (JOURNAL, SPOOL):
            (folder / name).unlink()
        return None


def _refuse_unwritable(job: Job, folder: Path, text: MethodText, inherited: dict[str, Any]) -> None:
    """Raise SourceError where manifest or card could not be written at the end, whatever the source's files hold."""
    with told(f"no manifest and card can be written for {shown(job.source.name)}", SourceError):
        draft = make_manifest(job, Run(folder)).model_copy(update={"weight_files": ("weights",)})
        render(draft, text, inherited).encode()
        parse(Manifest, parse_json(draft.to_text(), "the manifest", SourceError), "the manifest")
