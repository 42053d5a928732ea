"""CTranslate2: int8, int16 or float weights, written by CTranslate2's own converter and verified against the source.

Documentation: https://opennmt.net/CTranslate2/quantization.html. The converter silently produces wrong output for
some models. An artifact is therefore accepted only if CTranslate2 and transformers agree on a short text's
log-probabilities. Not supported: architectures not measured to be exact, and settings that a short text cannot verify
(RoPE scaling, sliding windows).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.checkpoints.rows import FLOATS
from quantkit.contracts.format import Content
from quantkit.contracts.method import CheckedJob, Job, Method, PeakMemory, Shapes
from quantkit.contracts.run import Checked, Run
from quantkit.engines.ctranslate2 import Ct2Generator, compute_type_for, import_engine, notes_on
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats.ctranslate2.architectures import GEMMA4, SourceTensors, refusal, refusal_of_config
from quantkit.formats.ctranslate2.model_file import open_ct2_model
from quantkit.models.config import ADD_ROWS
from quantkit.models.source import OverriddenSource
from quantkit.records.recipe import Strict
from quantkit.system.files import temporary_folder
from quantkit.system.memory import GROWTH

if TYPE_CHECKING:
    from quantkit.models.skeleton import Skeleton
    from quantkit.models.source import Source

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int16": 2}  # all others are int8

PIECE = 1 << 20  # values checked at a time
CONVERTING = 14  # bytes per value during conversion to codes
PROOF_TOKENS = 96
PROVEN_WEIGHTS = 500_000_000  # larger models are compared on their first blocks only
SENTENCE = "The keeper of the old lighthouse wrote the weather down each evening, and counted the boats in spring. "
# Bounds on the mean absolute difference of log-probabilities over tokens and vocabulary.
# Same weights in both engines, float32: measured 3e-7 (random tiny models) to 1e-5 (SmolLM2-135M); the smallest
# known fault of a conversion, Llama 3's rope scaling, is 1.7e-3.
SAME_WEIGHTS = 5e-4
# Against the source: about four times the largest measured on SmolLM2-135M and on a 260k-parameter model
# (float16 0.0027, bfloat16 0.026, int16 0.091, int8 0.53 with its int8 activations).
FROM_SOURCE = {"float32": SAME_WEIGHTS, "float16": 0.01, "bfloat16": 0.1, "int16": 0.4, "int8": 2.0}


class Options(Strict):
    """Options of CTranslate2: none."""


def _check(job: Job[Options]) -> Checked[None]:
    from quantkit.models.skeleton import open_skeleton, refuse_shapes

    import_engine()
    if "config.json" not in job.source.hashed_files or job.source.quantization is not None:
        raise UnsupportedError(
            f"CTranslate2's converter reads checkpoint folders of floats, and {job.source.model} is not one. "
            "Make one with `--method float`, or `quantkit import` of a GGUF file, and convert that."
        )
    settings = job.source.settings
    if reason := refusal(settings):
        raise UnsupportedError(
            f"the method ctranslate2 cannot take {job.source.model} ({job.source.architecture}): {reason}"
        )
    refuse_shapes(job.source, open_skeleton(job.source.config, native=True))
    tokens = 1 + max(job.source.tokenizer().get_vocab().values(), default=-1)
    if tokens > settings.vocab_size:
        raise UnsupportedError(
            f"{job.source.model}: its tokenizer has {tokens} tokens and its embedding {settings.vocab_size} rows, "
            f"but CTranslate2 needs a row for each token: {ADD_ROWS}"
        )
    item = ITEM_BYTES.get(job.bits, 1)
    weights = sum(t.parameters * (item if len(t.shape) > 1 else 4) for t in job.source.tensors.values())
    scales = sum(4 * t.shape[0] for t in job.source.tensors.values() if len(t.shape) > 1)
    side = sum(path.stat().st_size for path in job.source.side_files().values())
    return Checked(None, weights + scales + 2 * side)


def _refuse_beyond_float16(job: Job) -> None:
    """Raise UnsupportedError for a value that overflows float16 and that the converter would store as infinity."""
    import torch

    from quantkit.numerics.grid import cast_finite

    for name in (name for name, info in job.source.tensors.items() if info.dtype in FLOATS):
        for _, piece in job.source.in_rows(name).pieces(PIECE):
            cast_finite(torch.from_numpy(piece), torch.float16, f"{name} of {job.source.model}")


def _write(job: CheckedJob[Options, None], run: Run) -> None:
    from quantkit.formats.ctranslate2.converter import write_model

    if job.bits in ("float16", "int8_float16"):
        _refuse_beyond_float16(job)
    write_model(job.source, run.folder, job.bits, run.progress)
    for name, variable in open_ct2_model(run.folder / "model.bin").variables.items():
        if variable.shape and not name.endswith("_scale"):
            run.findings.count(variable.dtype)
    short = _proven_part(job.source)
    with run.progress.step("comparing with the source", 1) as advance, temporary_folder() as temp:
        if short is not None:
            short.copy_side_files(temp)
            write_model(short, temp, job.bits)
        _prove(job if short is None else replace(job, source=short), run, run.folder if short is None else temp)
        advance()


def _proven_part(source: Source) -> Source | None:
    """Return a truncated model with each kind of block if the model has more than `PROVEN_WEIGHTS` weights, else None.

    The comparison loads two float32 models in turn. Blocks of one kind are converted alike.
    """
    settings = source.settings
    count, outside, each = int(settings.num_hidden_layers), _weights_outside(settings), _weights_of_block(source)
    if sum(info.parameters for info in source.tensors.values()) <= PROVEN_WEIGHTS:
        return None
    kinds = list(getattr(settings, "layer_types", None) or [])[:count]
    least = next((n for n in range(1, len(kinds)) if set(kinds[:n]) == set(kinds)), len(kinds) or 1)
    most = 1 if settings.model_type in GEMMA4 else (PROVEN_WEIGHTS - outside) // each  # its last block must be full
    short = _shortened(source, max(least, most, 1))
    return short if short.settings.num_hidden_layers < count else None


def _shortened(source: Source, blocks: int) -> Source:
    """Return the source as a model of its first `blocks` decoder blocks; tensors of other blocks are unused."""
    known = getattr(source.settings, "attribute_map", {})
    names = {"num_hidden_layers", "n_layer", known.get("num_hidden_layers", "num_hidden_layers")}
    config: dict[str, Any] = {name: blocks for name in names if name in source.config}
    if isinstance(kinds := source.config.get("layer_types"), list):
        config["layer_types"] = kinds[:blocks]
    if isinstance(own := source.config.get("per_layer_config"), dict):
        config["per_layer_config"] = {block: values for block, values in own.items() if int(block) < blocks}
    return OverriddenSource(source, config=config)


def _weights_outside(settings: Any) -> int:
    return int(settings.vocab_size) * int(settings.hidden_size) * (1 if settings.tie_word_embeddings else 2)


def _weights_of_block(source: Source) -> int:
    weights = sum(info.parameters for info in source.tensors.values())
    return max(1, (weights - _weights_outside(source.settings)) // int(source.settings.num_hidden_layers))


def proof_ids(tokenizer: Any, settings: Any) -> list[int]:
    """Return the token ids of the comparison text: at most 96, including special tokens."""
    ids: list[int] = tokenizer(SENTENCE * PROOF_TOKENS)["input_ids"]
    longest = getattr(settings, "max_position_embeddings", None) or PROOF_TOKENS
    return ids[: min(PROOF_TOKENS, longest)]


def _prove(job: Job, run: Run, folder: Path) -> None:
    """Compare the log-probabilities of the converted model in `folder` with transformers'.

    Raises UnsupportedError if they differ by more than the bounds.
    """
    import torch

    from quantkit.models.skeleton import open_skeleton, set_parameter, source_name

    supported = import_engine().get_supported_compute_types("cpu")
    settings = job.source.settings
    ids = proof_ids(job.source.tokenizer(), settings)
    own = compute_type_for(job.bits, supported)
    exact = _engine_log_probs(folder, "float32", ids)
    native = exact if own == "float32" else _engine_log_probs(folder, own, ids)
    skeleton = open_skeleton(job.source.config, native=True)
    for name in skeleton.parameter_names():
        value = job.source.tensor(source_name(job.source, skeleton, name)).to(torch.float32, copy=True)
        set_parameter(skeleton.model, name, value)
    skeleton.model.tie_weights()
    from_source = float(np.abs(native - _log_probs(skeleton, ids)).mean())
    _fill(skeleton, folder / "model.bin", settings)
    same_weights = float(np.abs(exact - _log_probs(skeleton, ids)).mean())
    bound = FROM_SOURCE["int8" if job.bits.startswith("int8") else job.bits]
    for difference, limit, what in (
        (same_weights, SAME_WEIGHTS, "transformers with the same weights"),
        (from_source, bound, f"the source, for {job.bits}"),
    ):
        if not difference <= limit:
            raise UnsupportedError(
                f"CTranslate2 answers differently from {what}: {job.source.model} ({job.source.architecture}), "
                f"mean difference of log-probabilities {difference:.2g} over {len(ids)} tokens, more than "
                f"{limit:g}. Use another method."
            )
    blocks = int(settings.num_hidden_layers)
    part = f" with the first {blocks} of its blocks" if folder != run.folder else ""
    run.findings.note(
        f"checked against transformers on {len(ids)} tokens{part}: mean difference of log-probabilities "
        f"{from_source:.2g} to the source (computed in {own}), {same_weights:.1g} with the same weights"
    )
    for note in notes_on(own):
        run.findings.note(note)


def _engine_log_probs(folder: Path, compute_type: str, ids: list[int]) -> np.ndarray:
    """Return CTranslate2's log-probabilities, float32 (T, V)."""
    import torch

    model = Ct2Generator(folder, compute_type, torch.get_num_threads())
    return torch.log_softmax(torch.from_numpy(model.window(ids)), -1).numpy()


def _log_probs(skeleton: Skeleton, ids: list[int]) -> np.ndarray:
    """Return transformers' log-probabilities, float32 (T, V)."""
    import torch

    with torch.inference_mode():
        return torch.log_softmax(skeleton.model(torch.tensor([ids])).logits[0], -1).numpy()


def _fill(skeleton: Skeleton, model_bin: Path, settings: Any) -> None:
    """Load the artifact's dequantized weights into the skeleton; raise ArtifactError if they do not fit."""
    import torch

    parameters = dict(skeleton.model.named_parameters())
    tensors = SourceTensors(open_ct2_model(model_bin), settings)
    for name in tensors.names():
        values = tensors.read(name)
        parameter = parameters.pop(name, None)
        if parameter is None or parameter.shape != values.shape:
            raise ArtifactError(f"{model_bin}: the tensor {name} {tuple(values.shape)} is not in the model")
        for start, piece in values.pieces(PIECE):
            parameter.data[start : start + len(piece)] = torch.from_numpy(piece)
    if parameters:
        raise ArtifactError(f"{model_bin} lacks the tensor {next(iter(parameters))}")


def _peak_memory(job: Job, shapes: Shapes) -> PeakMemory:
    """Return the larger of the peaks of conversion and comparison, in bytes.

    Conversion holds the tensors outside the blocks, one block, its fused layers, and the slab being quantized.
    """
    from quantkit.formats.ctranslate2.converter import SLAB

    joined = max((rows * columns for rows, columns in shapes.stages), default=0)
    largest = max(joined, shapes.largest_outside)
    at_once = largest if job.bits == "int16" else min(largest, SLAB)
    held = shapes.item_bytes * (shapes.block_parameters + joined + _weights_outside(job.source.settings))
    part = _proven_part(job.source) or job.source
    blocks = int(part.settings.num_hidden_layers)
    # The engine holds everything in float32; blocks and an untied head twice for a while
    # (measured); a tied head becomes a separate matrix.
    ends = int(part.settings.vocab_size) * int(part.settings.hidden_size)
    matrices = 2 if part.settings.tie_word_embeddings else 3
    engine = 4 * (matrices * ends + 2 * blocks * _weights_of_block(job.source))
    proof = engine + 6 * 4 * PROOF_TOKENS * shapes.vocabulary + GROWTH  # with logits and log-probabilities
    return PeakMemory(work=held + CONVERTING * at_once, further={"the proof": proof})


METHOD = Method(
    name="ctranslate2",
    summary="int8 rows, int16 or floats for the CTranslate2 engine, checked against the source",
    reference="https://opennmt.net/CTranslate2/quantization.html",
    bits=("int8", "int8_float16", "int8_bfloat16", "int8_float32", "int16", "float16", "bfloat16", "float32"),
    default_bits="int8",
    Options=Options,
    makes=Content.ENGINE_MODEL,
    default_format="ctranslate2",
    check=_check,
    write=_write,
    peak_memory=_peak_memory,
    refuse_config=refusal_of_config,
)
