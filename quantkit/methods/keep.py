"""KEEP: store a quantized source's codes in another layout, without rounding, bit-identical in value.

Unquantized tensors become float16, or bfloat16 for MXFP4 in compressed-tensors.
Both layouts need the same grid: value = (code - zero) * scale in the same groups. GPTQ cannot store a zero point of 0;
AWQ and compressed-tensors cannot store a column order. MXFP4 has the same grid in compressed-tensors and GGUF.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from quantkit.calibration.kv_scales import WithKvScales
from quantkit.contracts.format import Content, Layout
from quantkit.contracts.method import CheckedJob, Job, Method
from quantkit.contracts.run import Checked, Run
from quantkit.errors import RecipeError, UnsupportedError
from quantkit.formats._quantized_checkpoint import QuantizedCheckpoint
from quantkit.methods._layer_by_layer import write_layers
from quantkit.models.source import Source
from quantkit.numerics.quantized_weight import GroupedWeight, ScaledWeight


class Options(WithKvScales):
    """Options of KEEP."""


def _source(job: Job) -> QuantizedCheckpoint:
    """Return the source with access to its codes; raise UnsupportedError if it is not quantized."""
    if isinstance(origin := job.source.origin, QuantizedCheckpoint):
        return origin
    how = job.source.quantization or "not quantized"
    if not job.source.own_files:
        how = "read with adapters, so its values have no codes"
    raise UnsupportedError(
        f"keep rewrites codes of gptq, awq and compressed-tensors checkpoints, and {job.source.model} is {how}"
    )


def _bits_of(source: Source) -> str | None:
    """Return the bits of the source's codes, or None if it has none."""
    if not isinstance(origin := source.origin, QuantizedCheckpoint):
        return None
    with suppress(UnsupportedError):
        layout = origin.layout()
        return str(layout.bits) if layout.values == "codes" else layout.values
    return None


def _check(job: Job[Options]) -> Checked[Layout]:
    source = _source(job)
    layout = source.layout()
    bits = _bits_of(source)
    if bits not in METHOD.bits:
        raise UnsupportedError(f"keep writes codes of {', '.join(METHOD.bits)} bits, and {source.model} has {bits}")
    if bits != job.bits:
        what = f"have {bits} bits" if layout.values == "codes" else f"are {bits}"
        raise RecipeError(f"the codes of {job.source.model} {what}: leave --bits out, or give --bits {bits}")
    if differing := sorted(source.quantized ^ job.skeleton.linears().keys()):
        how = "quantized" if differing[0] in source.quantized else "not quantized"
        raise UnsupportedError(
            f"{differing[0]} of {job.source.model} is {how}, and the format {job.format.name} stores the other kind"
        )
    checked = job.check_layout(layout)
    plan = checked.plan
    if layout.least_zero < plan.least_zero:
        raise UnsupportedError(
            f"{job.source.model} has zero points of {layout.least_zero}, and the format {job.format.name} stores none "
            f"below {plan.least_zero}"
        )
    return replace(checked, options={}, notes=(*checked.notes, *_rounded(source, plan.dtype)))


def _rounded(source: QuantizedCheckpoint, dtype: str) -> tuple[str, ...]:
    """Return a note that unquantized tensors are rounded to `dtype`."""
    stored = {"float16": "F16", "bfloat16": "BF16"}[dtype]
    others = [n for n, info in source.tensors.items() if n not in source.quantized and info.dtype != stored]
    return (f"tensors that are not quantized become {dtype}: {len(others)}, such as {others[0]}",) if others else ()


def _write(job: CheckedJob[Options, Layout], run: Run) -> None:
    reader = _source(job).reader

    def codes(name: str) -> GroupedWeight | ScaledWeight:
        value = reader.read(name)
        assert isinstance(value, GroupedWeight | ScaledWeight)
        return value

    write_layers(job, run, "writing codes", lambda _names: codes)


METHOD = Method(
    name="keep",
    summary="the codes of a quantized source in another layout, exactly",
    reference="docs/formats.md",
    bits=("2", "3", "4", "6", "8", "mxfp4"),
    default_bits="4",
    Options=Options,
    makes=Content.GROUPED_CODES,
    default_format="compressed-tensors",
    check=_check,
    write=_write,
    calibrated=lambda options: options.kv_scales,
    other_kinds={"mxfp4": (Content.MXFP4_VALUES, "gguf")},
    bits_of=_bits_of,
)
