"""Turn a recipe into a checked job; raise every error that can be found before long work.

If a method refuses a model, the error lists the methods whose checks accept it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.calibration.tokens import context_notes, draw_tokens
from quantkit.checkpoints.side_files import GENERATION, VOCABULARIES
from quantkit.contracts.format import Content, Format
from quantkit.contracts.method import CheckedJob, Job, Method
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_format, find_format_for, find_method, formats, methods
from quantkit.contracts.stored import kv_scales_of
from quantkit.conversion.forecast import Forecast, fit_memory
from quantkit.conversion.staging import place_of, refuse_existing, refuse_overlap, refuse_small_disk
from quantkit.data.texts import encode
from quantkit.errors import ArtifactError, QuantkitError, RecipeError, SourceError, UnsupportedError
from quantkit.formats.source import open_source
from quantkit.models.architectures import PROVEN
from quantkit.models.config import ADD_ROWS, refuse_ids, torch_left_out, vocabulary_of
from quantkit.models.source import OverriddenSource, Source
from quantkit.records.recipe import ConvertRecipe, ResourceSpec
from quantkit.system.device import AUTO, CPU, device_memory, find_device
from quantkit.system.files import safe_name
from quantkit.system.ranks import without_ranks
from quantkit.system.untrusted import read_object, shown

KEPT = ("F64", "F32", "F16", "BF16", "I64", "I32")  # types of tensors that readers take for no codes
KEPT_SO, LOST = "are stored unquantized", "are left out"  # what happens to tensors outside the model
USELESS = "are left out: their blocks reuse other blocks' values, and engines fuse them with quantized layers"
OFFLOAD_BYTES = 20_000_000  # of activations in memory on the CPU; a file costs next to nothing there
OFFLOAD_SHARE = 0.25  # of a GPU's memory


@dataclass(frozen=True)
class ReadyJob:
    """A checked job with the artifact's folder `out`, the disk space it needs in bytes, and the memory forecast.

    `force`: replace an artifact at `out`.
    """

    job: CheckedJob
    out: Path
    force: bool
    disk_bytes: int
    forecast: Forecast | None


def prepare(recipe: ConvertRecipe, source: Source | None = None, resources: ResourceSpec | None = None) -> Job:
    """Return a job after all checks that read no weights: method, bits, format, options, device, checkpoint."""
    method, resources = find_method(recipe.method), resources or ResourceSpec()
    bits = method.parse_bits(recipe.bits)
    kind = find_format_for(method, recipe.format, bits)
    options = _options(method, kind, bits, recipe)
    source = source or open_source(recipe.model, recipe.revision, recipe.adapters)
    if recipe.bits is None and (own := method.bits_of(source)) in method.bits:
        bits, kind = own, find_format_for(method, recipe.format, own)
    recipe = recipe.model_copy(update={"bits": bits})
    if getattr(options, "kv_scales", False) and kind.kv_scales is None:
        raise RecipeError(
            f"the format {kind.name} holds no scales of a key-value cache: leave kv_scales out, or give --format "
            + " or ".join(name for name, each in formats().items() if each.kv_scales is not None)
        )
    if reason := method.refuse_config(source.config):
        raise UnsupportedError(
            f"the method {method.name} cannot take {source.model} ({shown(source.architecture)}): {reason}. "
            "`quantkit methods` lists the others."
        )
    calibrated, device = method.calibrated(options), resources.device
    if calibrated or device != AUTO:
        device = find_device(device)  # refuses a missing device
    if not calibrated:
        device = CPU  # the other methods compute there only
    offload = _offload_bytes(device) if resources.offload_gb is None else int(resources.offload_gb * 1e9)
    return Job(kind.prepared(source), recipe, method, kind, options, device, offload, resources.max_memory)


def _options(method: Method, kind: Format, bits: str, recipe: ConvertRecipe) -> Any:
    """Return the recipe's options; those that it leaves out are the format's defaults, then the method's."""
    preferred = kind.defaults if method.kind_of(bits)[0] is Content.GROUPED_CODES else {}
    own = {name: value for name, value in preferred.items() if name in method.Options.model_fields}
    return method.parse_options({**own, **recipe.options})


def _offload_bytes(device: str) -> int:
    """Return the default limit of activations in memory, in bytes."""
    memory = None if device == CPU else device_memory(device)
    return OFFLOAD_BYTES if memory is None else int(OFFLOAD_SHARE * memory[1])


def default_out(recipe: ConvertRecipe) -> Path:
    """Return the default output folder, `MODEL-ADAPTERS-METHOD-BITS` with the given options appended."""
    names = [Path(place).name for place in (recipe.model, *recipe.adapters)]
    return Path(safe_name("-".join([names[0] or "model", *filter(None, names[1:]), recipe.label])))


def place_for(job: Job, out: str | Path | None, force: bool = False) -> Path:
    """Return the artifact's folder; raises OutputError if nothing can be written there."""
    place = place_of(default_out(job.recipe) if out is None else out)
    refuse_existing(place, force)
    folder = job.source.folder
    # A GGUF file shares its folder with other files; a checkpoint owns its folder.
    is_checkpoint = "config.json" in job.source.hashed_files
    refuse_overlap(place, folder if is_checkpoint else folder / job.source.weight_files[0])
    return place


def check(job: Job, out: str | Path | None = None, force: bool = False) -> ReadyJob:
    """Check output, method, calibration text, disk and memory before long work, and return the checked job.

    `out` is the artifact's folder (default: a name made of the recipe); `force` allows replacing an artifact there.
    """
    _refuse_ranks(job)
    place = place_for(job, out, force)
    held, held_notes = _passed_through(job, job.source.passthrough)
    if len(held) < len(job.source.passthrough):
        job = replace(job, source=OverriddenSource(job.source, passthrough=held))
    tokenizer_notes = _tokenizer_notes(job)  # first: every method refuses an unusable tokenizer
    try:
        checked = job.method.check(job)
    except UnsupportedError as error:
        raise UnsupportedError(f"{str(error).rstrip('.')}. {alternatives_to(job)}") from None
    further: tuple[str, ...] = ()
    if job.method.needs_torch(job.options):
        source, further = _with_leftovers(job)
        job = replace(job, source=source)
    notes = (
        *held_notes,
        *checked.notes,
        *further,
        *_source_notes(job.source),
        *_untested_notes(job),
        *_left_alone_notes(job),
        *tokenizer_notes,
    )
    others = job.source.others.values()  # methods count two bytes for each value that stays as it is
    nbytes = checked.nbytes + sum(max(0, info.nbytes - 2 * info.parameters) for info in others)
    # At the end, a checkpoint's spool and its shards are on the disk together.
    disk_bytes = nbytes * (2 if job.format.keeps else 1)
    refuse_small_disk(place, disk_bytes)
    tokens = None
    if job.method.calibrated(job.options):
        recipe, config = job.recipe, job.source.config
        notes = (*notes, *context_notes(recipe.calibration, config))
        tokens = draw_tokens(job.source.tokenizer(), recipe.calibration, recipe.seed, config)
        _refuse_many_ranks(job.shards.size, *tokens.ids.shape)
    checked_job = CheckedJob.of(job, replace(checked, nbytes=nbytes, notes=notes), tokens)
    checked_job, forecast = fit_memory(checked_job)
    if forecast is not None and forecast.offloaded:
        disk_bytes += forecast.offloaded
        refuse_small_disk(place, disk_bytes)
    return ReadyJob(checked_job, place, force, disk_bytes, forecast)


def _refuse_ranks(job: Job) -> None:
    """Raise RecipeError if several processes were started and the method's work cannot be shared."""
    reason = job.method.refuse_ranks(job) if job.shards.size > 1 else None
    if reason is not None:
        raise RecipeError(
            f"{job.shards.size} processes cannot share what the method {job.method.name} does: {reason}. Start one, "
            "without torchrun; gptq and awq can be shared."
        )


def _refuse_many_ranks(processes: int, sequences: int, length: int) -> None:
    """Raise RecipeError if there are fewer batches of calibration sequences than processes."""
    if processes == 1:
        return
    from quantkit.calibration.walk import batch_size

    batches = -(-sequences // batch_size(length))
    if batches < processes:
        raise RecipeError(
            f"{sequences} calibration sequences of {length} tokens go through the model in {batches} batches, which "
            f"{processes} processes cannot share. Start at most {batches}, or give more sequences."
        )


def _source_notes(source: Source) -> tuple[str, ...]:
    """Return the source's notes, and notes if it was quantized before or names code of its own."""
    notes = list(source.notes)
    if source.quantization is not None:
        notes.append(
            f"the source was quantized before ({source.quantization}): losses add up, and divergences from it show "
            "only the last one"
        )
    with suppress(ArtifactError):
        if kv_scales_of(Model(None, source)):
            notes.append("the source's scales of a key-value cache are left out; --kv-scales calibrates new ones")
    if "auto_map" in source.config:
        notes.append(
            f"the source names code of its own (auto_map); quantkit does not run it and reads the model as "
            f"transformers' {source.architecture}; the artifact names no code"
        )
    return tuple(notes)


def _untested_notes(job: Job) -> tuple[str, ...]:
    """Return a note if no test covers the architecture and the method accepts any architecture."""
    kind = job.source.architecture
    if kind in PROVEN or not job.method.makes.of_linear_layers:
        return ()
    return (
        f"the architecture {shown(kind)} is untested: quantkit reads it as transformers defines it, and no test "
        "compares them. Evaluate the artifact before you use it",
    )


def _left_alone_notes(job: Job) -> tuple[str, ...]:
    """Return a note on layers that stay unquantized although their shapes would allow quantization."""
    if not job.method.needs_torch(job.options) or not job.method.makes.of_linear_layers:
        return ()
    names = job.skeleton.left_alone()
    if not names:
        return ()
    verb, rest = ("stay", ", ...") if len(names) > 1 else ("stays", "")
    return (
        f"{len(names)} layer{'s' if len(names) > 1 else ''} {verb} unquantized: transformers keeps such layers in "
        f"float32 or published quantized checkpoints leave them alone: {names[0]}{rest}",
    )


def _tokenizer_notes(job: Job) -> tuple[str, ...]:
    """Return notes on the tokenizer.

    Raises SourceError if the tokenizer is missing or has more tokens than the model: the artifact would be unusable.
    """
    source = job.source
    is_folder = "config.json" in source.hashed_files
    if is_folder and source.side_files().keys().isdisjoint(VOCABULARIES):
        raise SourceError(
            f"{source.model} has no tokenizer ({', '.join(VOCABULARIES[:3])}), so its artifact could not be "
            "evaluated or used. Put the tokenizer's files next to the weights."
        )
    tokenizer, config = source.tokenizer(), source.settings.get_text_config().to_dict()
    added = tokenizer.get_added_vocab()
    plain = [place for token, place in tokenizer.get_vocab().items() if token not in added]
    refuse_ids(config, np.array(plain, np.int64), "its vocabulary")
    refuse_ids(config, encode(tokenizer, "a"), "every text")
    rows = vocabulary_of(config)
    without_row = [token for token, place in added.items() if rows is not None and place >= rows]
    path = source.side_files().get(GENERATION)
    given = config | (read_object(path, SourceError, "Fetch it again.") if path else {})
    notes = (*_ends_notes(given, rows), *(() if job.format.keeps else _lost_ends_notes(job.format, given, tokenizer)))
    if not without_row:
        return notes
    first = ", ".join(map(shown, without_row[:3]))
    return (*notes, f"the tokenizer has added tokens that the model has no row for: {first}; {ADD_ROWS}")


def _ends_notes(given: Mapping[str, Any], rows: int | None) -> tuple[str, ...]:
    """Return notes on special tokens without a row in the embedding; some published models have them and work."""
    return tuple(
        f"{name} is {shown(ids)}, but the embedding has {rows} rows: the model can neither read nor generate this token"
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if (ids := given.get(name)) is not None and rows is not None
        if any(number >= rows for number in (ids if isinstance(ids, list) else [ids]) if number is not None)
    )


def _lost_ends_notes(kind: Format, given: Mapping[str, Any], tokenizer: Any) -> tuple[str, ...]:
    """Return a note on end-of-text tokens that the format cannot store: it stores only the tokenizer's EOS."""
    ids = given.get("eos_token_id")
    ids = set(ids if isinstance(ids, list) else [ids]) - {None, tokenizer.eos_token_id}
    if not ids:
        return ()
    names = ", ".join(f"{shown(tokenizer.decode([number]))} ({number})" for number in sorted(ids)[:3])
    return (
        f"the model also ends texts with {names}; a {kind.name} file names only {shown(tokenizer.eos_token)}, so "
        "engines that do not know these tokens generate past them",
    )


def _with_leftovers(job: Job) -> tuple[Source, tuple[str, ...]]:
    """Return the source with tensors that its model does not use passed through or dropped, and notes on them."""
    from quantkit.models.skeleton import leftovers

    source = job.source
    idle, useless, outside = leftovers(source, job.skeleton)
    if not idle and not useless and not outside:
        return source, ()
    if job.method.makes is Content.FLOATS:
        useless, outside = [], [*useless, *outside]
    left_out = [_rest_note(source, {source.published(name): name for name in useless}, USELESS)] if useless else []
    held, notes = _passed_through(job, {source.published(name): name for name in outside})
    passthrough = {**source.passthrough, **held}
    return OverriddenSource(source, dropped={*idle, *useless, *outside}, passthrough=passthrough), (*left_out, *notes)


def _passed_through(job: Job, names: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return which tensors the format can store unchanged, and notes on them and on the tensors it leaves out.

    `names` and the result map published names to the names by which the source reads the tensors.
    """
    source = job.source

    def holds(name: str) -> bool:
        return job.format.keeps and source.info(name).dtype in KEPT and not source.is_dequantized(name)

    held = {published: name for published, name in names.items() if holds(name)}
    lost = {published: name for published, name in names.items() if published not in held}
    notes = [_rest_note(source, some, fate) for some, fate in ((held, KEPT_SO), (lost, LOST)) if some]
    return held, tuple(notes)


def _rest_note(source: Source, names: Mapping[str, str], fate: str) -> str:
    plural, count = "s" if len(names) > 1 else "", sum(source.info(name).parameters for name in names.values())
    what = "text half" if source.text_prefixes is not None else "architecture in transformers"
    first = ", ".join(list(names)[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} tensor{plural} of the source ({count:,} values) are outside its {what} and {fate}: {first}"


ASK = """import sys
from quantkit.conversion.check import hint
from quantkit.conversion.check import prepare
from quantkit.records.recipe import ConvertRecipe
print(hint(prepare(ConvertRecipe.model_validate_json(sys.argv[1])), sys.argv[2]))"""
UNKNOWN = "`quantkit methods` lists the others."


def alternatives_to(job: Job, but: str = "", walked: bool = False) -> str:
    """Return a sentence that lists the METHOD:BITS whose checks accept the source, except for the method `but`.

    All methods' checks run with default options, so use this in errors only. `walked`: the model was refused during
    calibration, so leave out all calibrating methods. If transformers was imported without torch, most checks cannot
    run in this process, and another process runs them.
    """
    if not torch_left_out():
        return hint(job, but, walked)
    command = [sys.executable, "-P", "-c", ASK, job.recipe.model_dump_json(), but]
    ended = subprocess.run(command, capture_output=True, text=True, env=without_ranks(os.environ), check=False)
    return ended.stdout.strip() if ended.returncode == 0 else UNKNOWN


def hint(job: Job, but: str, walked: bool = False) -> str:
    """Return the sentence of `alternatives_to`, with all checks run in this process."""
    others = [method for name, method in methods().items() if name != but and method.makes is not Content.FLOATS]
    names = [f"{method.name}:{bits}" for method in others if (bits := _accepted_bits(method, job, walked))]
    if not names:
        return "No other method takes this model."
    return f"Methods that take this model: {', '.join(names)}."


def _accepted_bits(method: Method, job: Job, walked: bool) -> str | None:
    """Return the first bits that the method's check accepts, trying its default first; None if it refuses all."""
    for bits in sorted(method.bits, key=lambda bits: bits != method.default_bits):
        recipe = job.recipe.model_copy(update={"method": method.name, "bits": bits, "options": {}, "format": None})
        kind, options = find_format(method.kind_of(bits)[1]), method.parse_options({})
        if method.refuse_config(job.source.config) or (walked and method.calibrated(options)):
            return None
        try:
            method.check(replace(job, recipe=recipe, method=method, format=kind, options=options))
            if method.calibrated(options):
                context_notes(recipe.calibration, job.source.config)
        except QuantkitError:
            continue
        return bits
    return None
