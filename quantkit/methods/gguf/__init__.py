"""GGUF: llama.cpp's K-quants, IQ types and plain types, written in one pass.

Optional: an importance matrix, or error feedback.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from quantkit.calibration.learned_options import Learned
from quantkit.contracts.format import Content
from quantkit.contracts.method import CheckedJob, Job, Method, PeakMemory, Shapes
from quantkit.contracts.run import Checked, Run
from quantkit.errors import RecipeError, near_miss
from quantkit.formats.gguf.architectures.record import FIXED_EPSILON
from quantkit.formats.gguf.file_types import (
    DEFAULT,
    EMBEDDING,
    OUTPUT,
    PER_LAYER,
    TENSOR_TYPES,
    UNWEIGHTED,
    WEIGHTED_ONLY,
    describe_fallbacks,
    given_type,
)
from quantkit.formats.gguf.ggml.library import IMPORTANCE_ONLY
from quantkit.formats.gguf.hyperparameters import ignored_window, rounds_yarn
from quantkit.formats.gguf.imatrix import importance_from, unweighted
from quantkit.formats.gguf.plan import Plan, guesses_further
from quantkit.formats.gguf.writer import GgufFile, plan_file, write_file, write_vocabulary
from quantkit.methods._targets import as_table, given_target, write_recipe
from quantkit.methods.gguf.mixed_precision import Target, choose, refuse_target, work_bytes
from quantkit.models.config import keep_tokenizer
from quantkit.system.sizes import parse_size

RECORD = "error_feedback"  # name of error_feedback.py's constants in manifests
BFLOAT16 = 2  # bytes per activation
FLOAT32 = 4  # bytes per activation where importance is summed


class Options(Learned):
    """Options of GGUF."""

    imatrix: bool = Field(False, description="weight the rounding by an importance matrix from the calibration text")
    imatrix_file: str | None = Field(None, description="weight the rounding by an importance file of llama.cpp")
    rounding: Literal["nearest", "gptq"] = Field(
        "nearest", description="gptq: choose codes with error feedback; nearest: the same bytes as llama.cpp"
    )
    awq: bool = Field(False, description="with rounding gptq: first scale input channels as the method awq does")
    target_size: str | int | None = Field(
        None, description="with bits auto: choose types for a file of this size, as 90MB"
    )
    target_bpw: float | None = Field(
        None, gt=0, description="with bits auto: choose types for these bits per weight of the whole file"
    )
    target_kld: float | None = Field(
        None, gt=0, description="with bits auto: choose types for this estimated divergence in nats per token"
    )
    split_max_size: str | int | None = Field(
        None, description="write files of at most this size, as 2GB, named as llama.cpp names them"
    )
    vocab_only: bool = Field(False, description="write only the keys and the tokenizer, no tensors")
    tensor_type: Annotated[dict[str, str] | None, BeforeValidator(as_table)] = Field(
        None, description="types of some tensors: PATTERN=TYPE,...; a pattern is a regular expression"
    )
    token_embedding_type: str | None = Field(
        None, description="type of the embedding, such as Q8_0 or Q4_K; also of a head tied to it"
    )
    output_tensor_type: str | None = Field(None, description="type of an output head not tied to the embedding")

    @property
    def feedback(self) -> bool:
        """Return whether codes are chosen with error feedback."""
        return self.rounding == "gptq"

    @property
    def targeted(self) -> bool:
        """Return whether tensor types are chosen automatically, for a target size or divergence."""
        return any(target is not None for target in (self.target_size, self.target_bpw, self.target_kld))

    @property
    def calibrated(self) -> bool:
        """Return whether calibration text is needed."""
        return self.imatrix or self.feedback or self.targeted

    @property
    def types(self) -> dict[str, str]:
        """Return the user-chosen types by regular expression; the last pattern found in a tensor's name wins."""

        def named(*pairs: tuple[str, str | None]) -> dict[str, str]:
            return {f"^{re.escape(name)}$": kind for name, kind in pairs if kind is not None}

        # As in llama.cpp, a per-block embedding has the embedding's type, unless a pattern names it.
        like = named((PER_LAYER, self.token_embedding_type))
        outside = named((EMBEDDING, self.token_embedding_type), (OUTPUT, self.output_tensor_type))
        return like | (self.tensor_type or {}) | outside


def check(job: Job[Options]) -> Checked[GgufFile]:
    """Check the job and plan the file.

    Raises UnsupportedError if llama.cpp would not reproduce the architecture, a tensor or the tokenizer,
    SourceError for an incomplete checkpoint, RecipeError for options that conflict or have no effect.
    """
    options = job.options
    bits, feedback = job.bits, options.feedback
    for what, given in (("the option imatrix", options.imatrix), ("rounding gptq", feedback)):
        if given and bits in UNWEIGHTED:
            raise RecipeError(f"{what} has no effect on {bits}. Leave it out, or choose Q2_K .. Q6_K.")
    for what, given in (("refine", options.refine), ("awq", options.awq)):
        if given and not feedback:
            raise RecipeError(f"{what} needs codes with error feedback. Add --rounding gptq, or leave {what} out.")
    if options.refine:
        from quantkit.calibration.learned_rounding import refuse_few_sequences

        refuse_few_sequences(job)
    if bits in WEIGHTED_ONLY and not (options.imatrix or options.imatrix_file or feedback):
        raise RecipeError(f"{bits} needs an importance matrix. Add --imatrix, --imatrix-file or --rounding gptq.")
    if options.imatrix_file is not None and (options.imatrix or feedback or bits in UNWEIGHTED):
        other = "imatrix" if options.imatrix else bits if bits in UNWEIGHTED else "rounding gptq"
        raise RecipeError(f"imatrix_file has no effect with {other}. Leave one of them out.")
    _refuse_types(options)
    split_bytes = 0 if options.split_max_size is None else parse_size(options.split_max_size, "split_max_size")
    weighted = options.imatrix_file is not None or options.calibrated
    file = plan_file(job.source, bits, options.types, split_bytes, weighted)
    _refuse_without_importance(job, file)
    if options.output_tensor_type is not None and OUTPUT not in file.plan.choices:
        raise RecipeError(
            f"output_tensor_type: the output head of {job.source.model} is tied to its embedding. Give "
            "token_embedding_type, which sets both."
        )
    notes = (*file.vocabulary.algorithm.notes, *_importance_notes(job, file))
    if options.vocab_only:
        if others := sorted(job.recipe.options.keys() - {"vocab_only"}):
            raise RecipeError(f"vocab_only writes no tensors, so {others[0]} has no effect. Leave one of them out.")
        return Checked(file, file.metadata_bytes, notes=notes)
    target = _target(job, file.metadata_bytes)
    if options.split_max_size is not None and split_bytes < 1:
        raise RecipeError("split_max_size = 0 is too small. Give a size such as 2GB.")
    for pattern in options.tensor_type or {}:
        if not any(given_type(tensor.name, {pattern: "F32"}) for tensor in file.plan.tensors):
            raise RecipeError(f"tensor_type: the pattern {pattern!r} matches no tensor's name.")
    nbytes = file.plan.tensor_bytes
    if target is not None:
        refuse_target(file.plan, target)
        nbytes = (nbytes if target.nbytes is None else max(target.nbytes, 0)) + work_bytes(job, file.plan)
    if options.calibrated:
        nbytes += _work_bytes(job, file.plan)
        if options.awq:
            from quantkit.calibration.channel_scales import unscaled_notes
            from quantkit.methods.gguf.error_feedback import usable_scalings

            notes = (*notes, *unscaled_notes(job, usable_scalings(job, file.plan)))
        if any(tensor.is_of_heads for tensor in file.plan.tensors):
            notes = (*notes, "the heads' projections of latent values are rounded without calibration")
    notes = (*notes, *describe_fallbacks(file.plan.choices), *_engine_notes(file), *_outside_notes(job, file.plan))
    return Checked(file, nbytes + file.metadata_bytes, notes=notes)


def _target(job: Job[Options], other_bytes: int) -> Target | None:
    """Return the target of the options, or None; `other_bytes` is the file's non-tensor size. Raises RecipeError."""
    options = job.options
    targets = ("target_size", "target_bpw", "target_kld")
    given_target(job, targets, ("tensor_type", "token_embedding_type", "output_tensor_type"), "types")
    if options.target_kld is not None:
        return Target(divergence=float(options.target_kld))
    if options.target_size is not None:
        return Target(nbytes=parse_size(options.target_size, "target_size") - other_bytes)
    if options.target_bpw is not None:
        return Target(nbytes=int(options.target_bpw * job.source.parameters / 8) - other_bytes)
    return None


def _work_bytes(job: Job[Options], plan: Plan) -> int:
    """Return the peak size of temporary files in bytes: activations and, with error feedback, packed blocks."""
    spec, hidden = job.recipe.calibration, plan.shape.hidden
    tokens = spec.sequences * spec.length
    between = tokens * hidden * BFLOAT16
    if not job.options.feedback:
        return between
    blocks = [tensor for tensor in plan.tensors if tensor.name.startswith("blk.") and len(tensor.shape) > 1]
    inside = tokens * (2 * hidden + max([3 * hidden, *(tensor.shape[-1] for tensor in blocks)])) * BFLOAT16
    # Unquantized blocks run, too; packed rows stay until the file is checked.
    return 2 * (between + inside) + sum(tensor.padded() for tensor in blocks)


def _engine_notes(file: GgufFile) -> list[str]:
    """Return notes on differences between llama.cpp's results and the source model's."""
    notes = []
    if window := ignored_window(file.source, file.plan.shape):
        notes.append(f"llama.cpp ignores the sliding window: beyond {window} tokens its output differs from the source")
    if rounds_yarn(file.source.settings):
        notes.append(
            "llama.cpp rounds YaRN's range of mixed frequencies to integers, unlike the source: the "
            "rotated values differ a little"
        )
    if file.plan.architecture.differs:
        notes.append(file.plan.architecture.differs)
    keys, row = file.plan.shape.keys, file.plan.architecture
    epsilon = keys.get("attention.layer_norm_rms_epsilon")
    if row.fixed_epsilon and epsilon != FIXED_EPSILON:
        notes.append(
            f"llama.cpp uses epsilon {epsilon:g} for the {row.fixed_epsilon}, the source {FIXED_EPSILON:g}: results "
            "differ a little"
        )
    if keys.get("rope.scaling.type") == "longrope":
        original = keys["rope.scaling.original_context_length"]
        notes.append(
            f"llama.cpp uses the rope's long factors if its context exceeds {original} tokens, transformers if "
            "the text does: set -c accordingly"
        )
    if guesses := [name for name in file.source.tensors if guesses_further(name, file.source, file.plan.shape.blocks)]:
        notes.append(f"{len(guesses)} tensors for multi-token prediction are left out, such as {guesses[0]}")
    return notes


def _outside_notes(job: Job[Options], plan: Plan) -> list[str]:
    """Return a note on the embedding's and head's share of the file, if the user chose their types."""
    if job.options.token_embedding_type is None and job.options.output_tensor_type is None:
        return []
    outside = [tensor for tensor in plan.tensors if tensor.name in (EMBEDDING, OUTPUT)]
    nbytes, weights = (sum(values) for values in zip(*((t.nbytes, math.prod(t.shape)) for t in outside), strict=True))
    others = plan.tensor_bytes - nbytes
    kinds = " and ".join(f"{tensor.name} {tensor.type}" for tensor in outside)
    return [
        f"{kinds}: {8 * nbytes / weights:.2f} bits per weight, {nbytes / plan.tensor_bytes:.0%} of the file's bytes, "
        f"and {8 * others / max(1, job.source.parameters - weights):.2f} bits per weight in all other tensors"
    ]


def _refuse_types(options: Options) -> None:
    types = options.tensor_type or {}
    named: dict[str, str | None] = {f"tensor_type: {pattern}": kind for pattern, kind in types.items()}
    named |= {"token_embedding_type": options.token_embedding_type, "output_tensor_type": options.output_tensor_type}
    for place, kind in named.items():
        if kind is not None and kind not in TENSOR_TYPES:
            known = ", ".join(TENSOR_TYPES)
            raise RecipeError(f"{place} = {kind!r} is not a type.{near_miss(kind, TENSOR_TYPES)} Known: {known}.")
    for pattern in types:
        try:
            re.compile(pattern)
        except re.error as error:
            raise RecipeError(f"tensor_type: the pattern {pattern!r} is not a regular expression: {error}.") from None


def _refuse_without_importance(job: Job, file: GgufFile) -> None:
    """Raise RecipeError for tensors whose types need an importance matrix that the job does not provide."""
    bare = [tensor for tensor in file.plan.tensors if tensor.type in IMPORTANCE_ONLY]
    if file.weighted:
        bare = [tensor for tensor in bare if not tensor.is_weighted]
    if not bare:
        return
    tensor, fix = bare[0], "Add --imatrix, --imatrix-file or --rounding gptq."
    if not tensor.is_weighted:
        fix = "quantkit measures none for it: set another type with --tensor-type, or the embedding's or head's option."
    raise RecipeError(
        f"{job.source.model}: {tensor.type} needs an importance matrix, and {tensor.name} has none"
        f"{f', nor have {len(bare) - 1} more tensors' if bare[1:] else ''}. {fix}"
    )


def _importance_notes(job: Job[Options], file: GgufFile) -> list[str]:
    """Return notes on tensors that the imatrix file lacks; raise RecipeError if their types need importance.

    The rules are those of `tensor_requires_imatrix` in llama.cpp's src/llama-quant.cpp.
    """
    if (path := job.options.imatrix_file) is None:
        return []
    tensors = unweighted(file.plan, importance_from(Path(path), file.plan))
    needing = IMPORTANCE_ONLY | ({"Q2_K"} if job.bits == "Q2_K_S" else set())
    if (bare := next((tensor for tensor in tensors if tensor.type in needing), None)) is not None:
        raise RecipeError(
            f"imatrix_file: {path} has no entry for {bare.name}, which {bare.type} needs. Give a complete "
            f"file, or another type: --tensor-type {bare.name}=Q4_K."
        )
    if not tensors:
        return []
    names = ", ".join(tensor.name for tensor in tensors[:3]) + (", ..." if tensors[3:] else "")
    count = f"{len(tensors)} of {len(file.plan.tensors)} tensors"
    return [f"{count} are rounded without importance, as the file lacks them: {names}"]


def write(job: CheckedJob[Options, GgufFile], run: Run) -> None:
    """Write ``NAME-BITS.gguf`` into the staging folder; raise SourceError for weights that ggml would corrupt."""
    file = job.checked.plan
    keep_tokenizer(job.source.tokenizer(), run.folder)  # GGUF output has no config.json
    if job.options.vocab_only:
        write_vocabulary(file, run)
        return
    if (target := _target(job, file.metadata_bytes)) is not None:
        types: Any = run.findings.options.get("tensor_type") or choose(job, run, file.plan, target)
        run.findings.options["tensor_type"] = types  # also of a resumed run
        file = file.with_types(types)
        weighting = {} if job.options.feedback else {"imatrix": True}  # the choice was made with it
        write_recipe(job, run, {"tensor_type": types, **weighting})
    if job.options.feedback:
        from quantkit.checkpoints.spool import Spool
        from quantkit.methods.gguf.error_feedback import quantize_blocks, recorded

        run.findings.options[RECORD] = recorded(job.options)
        spool = Spool(run.folder)
        try:
            quantize_blocks(job, run, file.plan, spool)
            write_file(file, run, {}, spool=spool)
        finally:
            spool.close()
    elif job.options.imatrix_file is not None:
        write_file(file, run, importance_from(Path(job.options.imatrix_file), file.plan), partial=True)
    elif job.options.calibrated:
        from quantkit.calibration.walk import measure_importance

        write_file(file, run, file.plan.with_same_inputs(measure_importance(job, run)))
    else:
        write_file(file, run, {})


def _calibrated(options: Options) -> bool:
    return options.calibrated


def _peak_memory(job: CheckedJob[Options, GgufFile], shapes: Shapes) -> PeakMemory:
    """Return the peak memory of calibration; all else is streamed."""
    from quantkit.calibration.channel_scales import scaling_bytes
    from quantkit.calibration.scale_tuning import refining_bytes
    from quantkit.calibration.sensitivity import peak_bytes
    from quantkit.methods import gptq
    from quantkit.methods.gguf.error_feedback import recorded

    options = job.options
    further = peak_bytes(job.recipe.calibration, shapes, with_head=True) if options.targeted else {}
    if not options.feedback:
        return PeakMemory(1, work=2 * FLOAT32 * job.batch_tokens * shapes.widest, further=further)
    streams = gptq.streams(job, shapes, recorded(options)["gptaq_share"])
    work = max(gptq.feedback_bytes(shapes, job.device), refining_bytes(options, shapes))
    if options.awq:
        work = max(work + 4 * shapes.block_parameters, scaling_bytes(shapes))  # scaled weights stay
    return PeakMemory(streams, suspended=True, work=work, further=further)


METHOD = Method(
    name="gguf",
    summary="K-quants Q2_K .. Q6_K, IQ1_S .. IQ4_NL, Q8_0, F16, BF16 for llama.cpp, with or without importance matrix",
    reference="https://github.com/ggml-org/llama.cpp",
    bits=tuple(DEFAULT),
    default_bits="Q4_K_M",
    Options=Options,
    makes=Content.GGML_BLOCKS,
    default_format="gguf",
    check=check,
    write=write,
    weights_comparable=lambda options: not options.awq,
    calibrated=_calibrated,
    needs_torch=_calibrated,
    peak_memory=_peak_memory,
    records=(RECORD,),
)
