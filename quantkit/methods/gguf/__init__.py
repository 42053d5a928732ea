"""GGUF: the files of llama.cpp and of everything built on it, with its K-quants, in one pass from
safetensors.

The file is byte for byte what llama.cpp's own converter (to BF16) and `llama_model_quantize` write for the
weights, with or without an importance matrix. Format: https://github.com/ggml-
org/ggml/blob/master/docs/gguf.md.

Not supported: IQ and TQ types, split files, importance files of llama.cpp, architectures that
`architectures.KNOWN` does not list.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from quantkit.core.spool import Spool
from quantkit.errors import RecipeError
from quantkit.methods.gguf.architectures import sliding_window
from quantkit.methods.gguf.mix import DEFAULT, describe_fallbacks
from quantkit.methods.gguf.plan import make_plan
from quantkit.methods.gguf.reader import read
from quantkit.methods.gguf.tokenizer import read_vocabulary
from quantkit.methods.gguf.writer import metadata_bytes, write_file
from quantkit.recipe import Strict
from quantkit.registry import Job, Method

UNWEIGHTED = ("Q8_0", "F16", "BF16")
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


class Options(Strict):
    """Options of the method."""

    imatrix: bool = Field(False, description="weight the rounding by an importance matrix from the calibration text")
    quality: Literal["llama.cpp", "best"] = Field(
        "llama.cpp", description="best: codes chosen with error feedback; llama.cpp: its own bytes"
    )


def check(job: Job) -> int:
    """Refuse what cannot be converted and return the bytes of the file.

    Raises UnsupportedError for an architecture, tensor or tokenizer that llama.cpp would not follow,
    SourceError for an incomplete checkpoint, RecipeError for an importance matrix that would change nothing.
    """
    if job.options.imatrix and job.bits in UNWEIGHTED:
        raise RecipeError(f"the option imatrix changes nothing for {job.bits}. Leave it out, or choose Q2_K .. Q6_K.")
    if job.options.quality == "best" and job.bits in UNWEIGHTED:
        raise RecipeError(f"quality best changes nothing for {job.bits}. Leave it out, or choose Q2_K .. Q6_K.")
    plan = make_plan(job.source, job.bits)
    vocabulary = read_vocabulary(job, job.source.tensors["model.embed_tokens.weight"].shape[0])
    for note in describe_fallbacks(plan.choices):
        job.tell(note)
    if window := sliding_window(job.source, plan.shape):
        job.tell(f"llama.cpp ignores the sliding window: beyond {window} tokens it differs from the source")
    return plan.tensor_bytes + metadata_bytes(plan, vocabulary)


def write(job: Job) -> None:
    """Write ``NAME-BITS.gguf`` into the staging folder; raises SourceError for weights ggml would spoil."""
    if job.options.quality == "best":
        from quantkit.methods.gguf.feedback import quantize_blocks

        spool = Spool(job.folder)
        try:
            quantize_blocks(job, make_plan(job.source, job.bits), spool)
            write_file(job, {}, spool=spool)
        finally:
            spool.close()
    elif job.options.imatrix:
        from quantkit.calibration import importance

        write_file(job, importance(job))
    else:
        write_file(job, {})


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
    runtimes=("llamacpp", "reference"),
    weight_files=("*.gguf",),
    calibrated=lambda options: options.imatrix or options.quality == "best",
    usage=USAGE,
)
