"""CTranslate2's own format: int8 rows (one scale each), int16, or floats; written by CTranslate2's converter.

Documentation: https://opennmt.net/CTranslate2/quantization.html. Read by CTranslate2 and what is built on it.
The converter is silently wrong for some models, so a converted model is *proven*: CTranslate2 and transformers
must give the same log-probabilities on a short text before the artifact counts. Not supported: architectures that
were not measured to be exact, and settings that a short text cannot prove (rope scaling, sliding windows).
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantkit.artifact import Artifact
from quantkit.checkpoints.side_files import SIDE_FILES
from quantkit.contracts.job import Job
from quantkit.contracts.method import Method
from quantkit.conversion.alternatives import instead
from quantkit.engines.ctranslate2 import Ct2Generator, compute_type_for, import_engine, notes_on
from quantkit.errors import ArtifactError, UnsupportedError, first_line
from quantkit.formats.ctranslate2.model_file import open_ct2_model
from quantkit.formats.ctranslate2.names import LAYOUTS, source_tensors
from quantkit.models.config import load_tokenizer, open_config
from quantkit.models.skeleton import Skeleton, open_skeleton, refuse_shapes, set_parameter, source_name
from quantkit.recipe import Strict

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int16": 2}  # all others are int8

# Why an architecture is refused, measured with CTranslate2 4.8.5 and transformers 5.23. LAYOUTS has the exact ones.
NO_LOADER = "CTranslate2's converter has no loader for it"
RENAMED = "CTranslate2's converter reads configuration fields that transformers 5 renamed"
REFUSED = {
    "gemma2": "CTranslate2 leaves out its soft-capping, so every answer would be a little wrong",
    "phi": RENAMED,
    "phi3": RENAMED,
    "gpt_neox": RENAMED,
    "granite": NO_LOADER,
    "mixtral": NO_LOADER,
    "mpt": NO_LOADER,
    "olmo2": NO_LOADER,
    "qwen3_moe": NO_LOADER,
    "smollm3": NO_LOADER,
    "stablelm": NO_LOADER,
}
UNPROVEN = "nobody has measured that CTranslate2 computes it exactly"

EXACT_ROPE = ("default", "linear")
# The converter takes these of Gemma 3 for granted: it does not find them in a configuration of transformers 5.
GEMMA3_ROPE_THETA = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
HEAD_DIM_NOT_EXPORTED = ("llama", "qwen2")
SILU_ONLY = ("llama", "mistral", "qwen2", "qwen3")
# A window shorter than the text is an error in CTranslate2; a shorter one than this would stop ordinary use.
SHORTEST_WINDOW = 2048

PROOF_TOKENS = 96
SENTENCE = "The keeper of the old lighthouse wrote the weather down each evening, and counted the boats in spring. "
# Bounds on the mean absolute difference of log-probabilities over tokens and vocabulary.
# Same weights in both engines, float32: measured 3e-7 (random tiny models) to 1e-5 (SmolLM2-135M); the smallest
# known fault of a conversion, Llama 3's rope scaling, is 1.7e-3.
SAME_WEIGHTS = 5e-4
# Against the source: about four times the largest measured on SmolLM2-135M and on a 260k-parameter model
# (float16 0.0027, bfloat16 0.026, int16 0.091, int8 0.53 with its int8 activations).
FROM_SOURCE = {"float32": SAME_WEIGHTS, "float16": 0.01, "bfloat16": 0.1, "int16": 0.4, "int8": 2.0}

USAGE = """
With `pip install ctranslate2 transformers`:

```python
import ctranslate2
from transformers import AutoTokenizer

generator = ctranslate2.Generator("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
tokens = tokenizer.convert_ids_to_tokens(tokenizer("Hello")["input_ids"])
[found] = generator.generate_batch([tokens], max_length=32)
print(tokenizer.decode(found.sequences_ids[0]))
```
"""


class Options(Strict):
    """CTranslate2 has no options."""


def refusal(settings: Any) -> str | None:
    """Why CTranslate2 would not compute a model of this transformers configuration exactly, or None."""
    kind = settings.model_type
    if kind not in LAYOUTS:
        return REFUSED.get(kind, UNPROVEN)
    if kind == "gemma3_text":
        return _gemma3_refusal(settings)
    rope = getattr(settings, "rope_parameters", None) or {}
    if (rope_type := rope.get("rope_type", "default")) not in EXACT_ROPE:
        why = "not exported in full, so answers would be silently wrong" if rope_type == "llama3" else "not proven"
        return f"its rope scaling {rope_type!r} is {why}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"partial_rotary_factor {rope['partial_rotary_factor']} is not exported"
    if kind in SILU_ONLY and settings.hidden_act != "silu":
        return f"CTranslate2 computes silu where config.json asks for {settings.hidden_act!r}"
    head_dim = getattr(settings, "head_dim", None)
    if kind in HEAD_DIM_NOT_EXPORTED and head_dim and head_dim * settings.num_attention_heads != settings.hidden_size:
        return f"CTranslate2 does not export head_dim {head_dim}, which is not hidden_size / num_attention_heads"
    if kind == "falcon" and settings.new_decoder_architecture and settings.multi_query:
        return "CTranslate2's converter takes Falcon's new architecture only with multi_query false"
    return _window_refusal(settings)


def _window_refusal(settings: Any) -> str | None:
    window = getattr(settings, "sliding_window", None)
    if window and window < min(SHORTEST_WINDOW, settings.max_position_embeddings):
        return f"CTranslate2 fails on texts longer than its sliding window of {window} tokens"
    if window and settings.model_type.startswith("qwen") and getattr(settings, "use_sliding_window", False):
        return "CTranslate2 leaves its sliding window out"
    return None


def _gemma3_refusal(settings: Any) -> str | None:
    for layer_type, theta in GEMMA3_ROPE_THETA.items():
        rope = settings.rope_parameters.get(layer_type) or {}
        if rope.get("rope_type", "default") != "default" or float(rope.get("rope_theta", theta)) != theta:
            return f"CTranslate2 exports no rope settings of Gemma 3 but rope_theta {theta:g} for {layer_type}"
    if settings.query_pre_attn_scalar != settings.head_dim:
        return f"CTranslate2 ignores query_pre_attn_scalar {settings.query_pre_attn_scalar}"
    return _window_refusal(settings)


def _check(job: Job) -> int:
    import_engine()
    settings = job.source.settings
    if reason := refusal(settings):
        raise UnsupportedError(
            f"the method ctranslate2 cannot take {job.source.model} ({job.source.architecture}): {reason}. "
            f"{instead(job.source, 'ctranslate2')}"
        )
    refuse_shapes(job.source, open_skeleton(job.source.config, native=True))
    tokens = 1 + max(job.source.tokenizer().get_vocab().values(), default=-1)
    if tokens > settings.vocab_size:
        raise UnsupportedError(
            f"{job.source.model}: its tokenizer has {tokens} tokens, its weights {settings.vocab_size} rows, "
            f"and CTranslate2 needs a row for each token. {instead(job.source, 'ctranslate2')}"
        )
    item = ITEM_BYTES.get(job.bits, 1)
    weights = sum(t.parameters * (item if len(t.shape) > 1 else 4) for t in job.source.tensors.values())
    scales = sum(4 * t.shape[0] for t in job.source.tensors.values() if len(t.shape) > 1)
    side = sum(path.stat().st_size for name in SIDE_FILES if (path := job.source.folder / name).is_file())
    return weights + scales + 2 * side


def _write(job: Job) -> None:
    with job.progress.step("converting with CTranslate2", 1) as advance:
        _convert(job)
        advance()
    tokenizer = job.source.tokenizer()
    if type(load_tokenizer(job.folder)) is not type(tokenizer):
        # The files name no class, and config.json, where transformers would look, is now CTranslate2's own.
        tokenizer.save_pretrained(job.folder)
    _mend_settings(job.folder, tokenizer)
    for name, variable in open_ct2_model(job.folder / "model.bin").variables.items():
        if variable.shape and not name.endswith("_scale"):
            job.count(variable.dtype)
    with job.progress.step("comparing with the source", 1) as advance:
        _prove(job)
        advance()


def _convert(job: Job) -> None:
    """Write model.bin, config.json and vocabulary.json into the job's folder; raises UnsupportedError."""
    from ctranslate2.converters import TransformersConverter

    stored = {t.dtype for t in job.source.tensors.values()}
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(stored.pop() if len(stored) == 1 else "", torch.float32)

    class StoredDtype(TransformersConverter):
        """Loads the weights in their stored dtype; the converter would round them to the configuration's."""

        def load_model(self, model_class: Any, path: str, **settings: Any) -> Any:
            return super().load_model(model_class, path, **{**settings, "dtype": dtype})

    made = job.folder / "converted"
    try:
        with _no_bars():
            StoredDtype(str(job.source.folder), low_cpu_mem_usage=True).convert(str(made), quantization=job.bits)
    except (ValueError, NotImplementedError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"CTranslate2's converter cannot take {job.source.model} ({job.source.architecture}): "
            f"{first_line(error)}. {instead(job.source, 'ctranslate2')}"
        ) from error
    for path in list(made.iterdir()):
        path.rename(job.folder / path.name)
    made.rmdir()
    gc.collect()


@contextmanager
def _no_bars() -> Iterator[None]:
    """Switch the progress bars of transformers off for a while."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _mend_settings(folder: Path, tokenizer: Any) -> None:
    """Mend two faults of the converter: null for a missing special token, tokens moved over unused ids."""
    path = folder / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    mended = {key: "" if value is None and key.endswith("_token") else value for key, value in settings.items()}
    path.write_text(json.dumps(mended, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    path = folder / "vocabulary.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    places = tokenizer.get_vocab()
    if any(written[place] != token for token, place in places.items()):
        vocabulary = [f"<extra_id_{i}>" for i in range(len(written))]
        for token, place in places.items():
            vocabulary[place] = token
        path.write_text(json.dumps(vocabulary, indent=2), encoding="utf-8")


def proof_ids(tokenizer: Any, settings: Any) -> list[int]:
    """The ids of the text that a conversion is proven on: at most 96 tokens, with what the tokenizer adds."""
    ids: list[int] = tokenizer(SENTENCE * PROOF_TOKENS)["input_ids"]
    longest = getattr(settings, "max_position_embeddings", None) or PROOF_TOKENS
    return ids[: min(PROOF_TOKENS, longest)]


def _prove(job: Job) -> None:
    """Compare CTranslate2 with transformers; raises UnsupportedError where they differ by more than the bounds."""
    supported = import_engine().get_supported_compute_types("cpu")
    settings = job.source.settings
    ids = proof_ids(job.source.tokenizer(), settings)
    own = compute_type_for(job.bits, supported)
    exact = _engine_log_probs(job.folder, "float32", ids)
    native = exact if own == "float32" else _engine_log_probs(job.folder, own, ids)
    skeleton = open_skeleton(job.source.config, native=True)
    for name in skeleton.parameter_names():
        value = job.source.tensor(source_name(job.source, skeleton, name)).to(torch.float32, copy=True)
        set_parameter(skeleton.model, name, value)
    skeleton.model.tie_weights()
    from_source = float(np.abs(native - _log_probs(skeleton, ids)).mean())
    _fill(skeleton, job.folder / "model.bin", settings)
    same_weights = float(np.abs(exact - _log_probs(skeleton, ids)).mean())
    bound = FROM_SOURCE["int8" if job.bits.startswith("int8") else job.bits]
    for got, most, what in (
        (same_weights, SAME_WEIGHTS, "transformers with the same weights"),
        (from_source, bound, f"the source, for {job.bits}"),
    ):
        if not got <= most:
            raise UnsupportedError(
                f"CTranslate2 answers differently from {what}: {job.source.model} ({job.source.architecture}), "
                f"mean difference of log-probabilities {got:.2g} over {len(ids)} tokens, at most {most:g} is "
                f"sound. {instead(job.source, 'ctranslate2')}"
            )
    job.tell(
        f"proven on {len(ids)} tokens: mean difference of log-probabilities {from_source:.2g} to the source "
        f"(computed in {own}), {same_weights:.1g} to transformers with the same weights"
    )
    for note in notes_on(own):
        job.tell(note)


def _engine_log_probs(folder: Path, compute_type: str, ids: list[int]) -> np.ndarray:
    """(T, V) float32 log-probabilities by CTranslate2."""
    model = Ct2Generator(folder, compute_type, torch.get_num_threads())
    return torch.log_softmax(torch.from_numpy(model.logits(np.asarray([ids]))[0]), -1).numpy()


def _log_probs(skeleton: Skeleton, ids: list[int]) -> np.ndarray:
    """(T, V) float32 log-probabilities by transformers."""
    with torch.inference_mode():
        return torch.log_softmax(skeleton.model(torch.tensor([ids])).logits[0], -1).numpy()


def _fill(skeleton: Skeleton, model_bin: Path, settings: Any) -> None:
    """Put the artifact's weights into the model; raises ArtifactError where they do not fit."""
    parameters = dict(skeleton.model.named_parameters())
    for name, values in read_file(model_bin, settings):
        parameter = parameters.pop(name, None)
        if parameter is None or parameter.shape != values.shape:
            raise ArtifactError(f"{model_bin}: the tensor {name} {tuple(values.shape)} is not one of the model's")
        parameter.data.copy_(values)
    if parameters:
        raise ArtifactError(f"{model_bin} lacks the tensor {next(iter(parameters))}")


def read_file(model_bin: Path, settings: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (tensor name of the source, float32 tensor in its shape) from a `model.bin`.

    `settings` is the transformers configuration of the source. Raises ArtifactError for a damaged file,
    UnsupportedError for an architecture that has no way back.
    """
    for name, values in source_tensors(open_ct2_model(model_bin), settings):
        yield name, torch.from_numpy(np.array(values))


def _read(artifact: Artifact) -> Iterator[tuple[str, torch.Tensor]]:
    yield from read_file(artifact.folder / "model.bin", open_config(dict(artifact.manifest.source.config)))


METHOD = Method(
    name="ctranslate2",
    summary="int8 rows, int16 or floats for the CTranslate2 engine, proven against the source",
    reference="https://opennmt.net/CTranslate2/quantization.html",
    bits=("int8", "int8_float16", "int8_bfloat16", "int8_float32", "int16", "float16", "bfloat16", "float32"),
    default_bits="int8",
    Options=Options,
    check=_check,
    write=_write,
    read=_read,
    engines=("ctranslate2", "reference"),
    weight_files=("model.bin",),
    usage=USAGE,
)
