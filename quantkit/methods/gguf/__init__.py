"""GGUF: the files of llama.cpp and of everything built on it, with its K-quants, in one pass from
safetensors.

The file is byte for byte what llama.cpp's own converter (to BF16) and `llama_model_quantize` write for the
weights, with or without an importance matrix. Format: https://github.com/ggml-
org/ggml/blob/master/docs/gguf.md.

Not supported: IQ and TQ types but IQ4_NL, architectures that `architectures.KNOWN` does not list.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from quantkit.calibration.importance import measured
from quantkit.contracts.job import Job
from quantkit.contracts.method import Method
from quantkit.errors import RecipeError, near_miss
from quantkit.formats.gguf.architectures.hyperparameters import ignored_window
from quantkit.formats.gguf.file_types import DEFAULT, TENSOR_TYPES, WEIGHTED_ONLY, asked_type, describe_fallbacks
from quantkit.formats.gguf.imatrix import importance_from
from quantkit.formats.gguf.plan import plan_of
from quantkit.formats.gguf.reader import read
from quantkit.formats.gguf.writer import metadata_bytes, vocabulary_of, write_file, write_vocabulary
from quantkit.methods.gguf.target import refuse_target, target_of, write_recipe
from quantkit.recipe import Strict
from quantkit.system.sizes import parse_size

UNWEIGHTED = ("Q8_0", "F16", "BF16", "F32")
USAGE = """
llama.cpp, and what is built on it:

```bash
llama-cli -m FOLDER/{file} -p "Hello"
llama-server -m FOLDER/{file}
```

Python, with `pip install llama-cpp-python`:

```python
from llama_cpp import Llama

print(Llama("FOLDER/{file}")("Hello", max_tokens=32)["choices"][0]["text"])
```
"""


def _as_types(value: Any) -> Any:
    """``attn_v=Q6_K,ffn_down=Q5_K`` as a mapping."""
    if not isinstance(value, str):
        return value
    pairs = [part.rpartition("=") for part in value.split(",") if part.strip()]
    return {pattern.strip(): kind.strip() for pattern, _, kind in pairs}


class Options(Strict):
    """Options of the method."""

    imatrix: bool = Field(False, description="weight the rounding by an importance matrix from the calibration text")
    imatrix_file: str | None = Field(None, description="weight the rounding by an importance file of llama.cpp")
    quality: Literal["llama.cpp", "best"] = Field(
        "llama.cpp", description="best: codes chosen with error feedback; llama.cpp: its own bytes"
    )
    target_size: str | int | None = Field(
        None, description="with bits auto: choose types for a file of this size, as 90MB"
    )
    target_bpw: float | None = Field(None, gt=0, description="with bits auto: choose types for these bits per weight")
    target_kld: float | None = Field(
        None, gt=0, description="with bits auto: choose types for this estimated divergence in nats a token"
    )
    split_max_size: str | int | None = Field(
        None, description="write files of at most this size, as 2GB, named as llama.cpp names them"
    )
    vocab_only: bool = Field(False, description="write the keys and the tokenizer alone, without a tensor")
    tensor_type: Annotated[dict[str, str] | None, BeforeValidator(_as_types)] = Field(
        None, description="types of single tensors: PATTERN=TYPE,...; a pattern is a regular expression"
    )


def check(job: Job) -> int:
    """Refuse what cannot be converted and return the bytes of the file.

    Raises UnsupportedError for an architecture, tensor or tokenizer that llama.cpp would not follow,
    SourceError for an incomplete checkpoint, RecipeError for options that contradict each other or change nothing.
    """
    if job.options.imatrix and job.bits in UNWEIGHTED:
        raise RecipeError(f"the option imatrix changes nothing for {job.bits}. Leave it out, or choose Q2_K .. Q6_K.")
    if _best(job) and job.bits in UNWEIGHTED:
        raise RecipeError(f"quality best changes nothing for {job.bits}. Leave it out, or choose Q2_K .. Q6_K.")
    if job.bits in WEIGHTED_ONLY and not (job.options.imatrix or job.options.imatrix_file or _best(job)):
        raise RecipeError(f"{job.bits} is worth nothing without importance. Add --imatrix or --quality best.")
    _refuse_types(job.options.tensor_type or {})
    plan = plan_of(job)
    if job.options.imatrix_file is not None:
        if job.options.imatrix or _best(job) or job.bits in UNWEIGHTED:
            other = "imatrix" if job.options.imatrix else job.bits if job.bits in UNWEIGHTED else "quality best"
            raise RecipeError(f"imatrix_file changes nothing with {other}. Leave one of them out.")
        importance_from(Path(job.options.imatrix_file), plan)
    vocabulary = vocabulary_of(job, plan)
    if job.options.vocab_only:
        given = sorted(job.recipe.options.keys() - {"vocab_only"})
        if given:
            raise RecipeError(f"vocab_only writes no tensor, so {given[0]} changes nothing. Leave one of them out.")
        return metadata_bytes(plan, vocabulary)
    target = target_of(job, metadata_bytes(plan, vocabulary))
    if job.options.split_max_size is not None and parse_size(job.options.split_max_size, "split_max_size") < 1:
        raise RecipeError("split_max_size = 0 leaves no room. Give a size such as 2GB.")
    for pattern in job.options.tensor_type or {}:
        if not any(asked_type(tensor.name, {pattern: "F32"}) for tensor in plan.tensors):
            raise RecipeError(f"tensor_type: the pattern {pattern!r} is found in no tensor's name.")
    if target is not None:
        refuse_target(plan, target)
    for note in describe_fallbacks(plan.choices):
        job.tell(note)
    if window := ignored_window(job.source, plan.shape):
        job.tell(f"llama.cpp ignores the sliding window: beyond {window} tokens it differs from the source")
    if original := plan.shape.keys.get("rope.scaling.original_context_length"):
        job.tell(
            f"llama.cpp takes the rope's long factors where its context has more than {original} tokens, transformers "
            "where the text has: give -c accordingly"
        )
    tensors = plan.tensor_bytes if target is None or target.nbytes is None else max(target.nbytes, 0)
    if target is not None:
        from quantkit.methods.gguf.mixed_precision import work_bytes

        tensors += work_bytes(job, plan)
    return tensors + metadata_bytes(plan, vocabulary)


def _best(job: Job) -> bool:
    return bool(job.options.quality == "best")


def _refuse_types(asked: dict[str, str]) -> None:
    for pattern, kind in asked.items():
        if kind not in TENSOR_TYPES:
            known = ", ".join(TENSOR_TYPES)
            raise RecipeError(
                f"tensor_type: {pattern} = {kind!r} is no type.{near_miss(kind, TENSOR_TYPES)} Known: {known}."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise RecipeError(f"tensor_type: the pattern {pattern!r} is no regular expression: {error}.") from None


def write(job: Job) -> None:
    """Write ``NAME-BITS.gguf`` into the staging folder; raises SourceError for weights ggml would spoil."""
    if job.options.vocab_only:
        write_vocabulary(job)
        return
    plan = plan_of(job)
    if chosen := _targeted(job.options):
        target = target_of(job, metadata_bytes(plan, vocabulary_of(job, plan)))
        if target is not None and "tensor_type" not in job.resolved:
            from quantkit.methods.gguf.mixed_precision import choose

            job.resolved["tensor_type"] = choose(job, target)
        write_recipe(job)
    if _best(job):
        from quantkit.checkpoints.spool import Spool
        from quantkit.methods.gguf.error_feedback import quantize_blocks

        spool = Spool(job.folder)
        try:
            quantize_blocks(job, plan_of(job), spool)
            write_file(job, {}, spool=spool)
        finally:
            spool.close()
    elif job.options.imatrix_file is not None:
        write_file(job, importance_from(Path(job.options.imatrix_file), plan))
    elif job.options.imatrix or chosen:
        write_file(job, measured(job))
    else:
        write_file(job, {})


def _targeted(options: Options) -> bool:
    return any(target is not None for target in (options.target_size, options.target_bpw, options.target_kld))


def _calibrated(options: Options) -> bool:
    return options.imatrix or options.quality == "best" or _targeted(options)


METHOD = Method(
    name="gguf",
    summary="files for llama.cpp: K-quants Q2_K .. Q6_K, Q8_0, F16, BF16, with or without importance matrix",
    reference="https://github.com/ggml-org/llama.cpp",
    bits=tuple(DEFAULT),
    default_bits="Q4_K_M",
    Options=Options,
    check=check,
    write=write,
    read=read,
    engines=("llamacpp", "reference"),
    weight_files=("*.gguf",),
    calibrated=_calibrated,
    light=lambda options: not _calibrated(options),
    usage=USAGE,
)
