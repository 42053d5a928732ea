"""FLOAT: write an unquantized checkpoint with all values rounded to one dtype.

Use it to turn a quantized source, such as a GGUF file, into a checkpoint that every engine loads.
"""

from __future__ import annotations

from quantkit.contracts.format import Content, Layout
from quantkit.contracts.method import CheckedJob, Job, Method
from quantkit.contracts.run import Checked, Run
from quantkit.records.recipe import Strict


class Options(Strict):
    """Options of FLOAT: none."""


def _check(job: Job[Options]) -> Checked[Layout]:
    return job.check_layout(Layout(dtype=job.bits))


def _write(job: CheckedJob[Options, Layout], run: Run) -> None:
    names = list(job.source.tensors)
    with (
        job.open_writer(run, job.checked.plan) as writer,
        run.progress.step("float: writing tensors", len(names), work=True) as advance,
    ):
        for name in names:
            writer.add(name, job.source.in_rows(name))
            advance()


METHOD = Method(
    name="float",
    summary="a plain checkpoint of floats; quantized sources are dequantized",
    reference="https://github.com/huggingface/safetensors",
    bits=("float16", "bfloat16", "float32"),
    default_bits="float16",
    Options=Options,
    makes=Content.FLOATS,
    default_format="float",
    check=_check,
    write=_write,
)
