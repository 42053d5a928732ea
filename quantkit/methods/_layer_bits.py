"""Mixed bits per layer for methods with grouped codes: set by the user, or chosen for a target size or divergence.

`Layout.bits_of` returns a layer's bits. Layers with the same input get the same bits, since engines fuse them (Q, K and
V; gate and up); so do all experts of a block. To choose bits, the added divergence of each bit width in each layer
is estimated from a few calibration sequences (calibration/sensitivity.py), with codes rounded to nearest on
a searched grid as in GPTQ. An integer program then allocates bits to layers
(numerics/allocation.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field

from quantkit.calibration.kv_scales import WithKvScales
from quantkit.calibration.sensitivity import kept_sensitivities, peak_bytes, work_bytes
from quantkit.contracts.format import Content, Layout
from quantkit.contracts.method import BitSearch, CheckedJob, Job, Shapes
from quantkit.contracts.run import Checked, Run
from quantkit.errors import RecipeError
from quantkit.methods._targets import AUTO, as_table, given_target, write_recipe
from quantkit.models.stand_in import layers_of_one_input
from quantkit.numerics.allocation import fewest_bytes, least_damage
from quantkit.numerics.grid import round_to_nearest
from quantkit.records.recipe import Strict

WIDTHS = (2, 3, 4, 8)
KIND = {AUTO: (Content.GROUPED_CODES, "compressed-tensors")}  # method that makes these bits, and its default format
SCALE_BITS = 16
VERSION = 1  # of the estimate's rounding; a new version invalidates cached scores
OPTION = "layer_bits"
TRIED_ROWS = 256  # rows per layer in the estimate


class BitsByLayer(Strict):
    """Options for bits per layer."""

    target_bpw: float | None = Field(
        None,
        gt=0,
        description="with bits auto: choose each layer's bits for these bits per weight of the linear layers in the "
        "blocks, scales and zero points included",
    )
    target_kld: float | None = Field(
        None, gt=0, description="with bits auto: choose each layer's bits for this estimated KLD in nats per token"
    )
    target_bits: tuple[int, ...] | None = Field(
        None, description="with bits auto: the bits to choose from, as 4,8; default: 2,3,4,8"
    )
    layer_bits: Annotated[dict[str, int] | None, BeforeValidator(as_table)] = Field(
        None, description="bits of some layers: PATTERN=BITS,...; a pattern is a regular expression"
    )


class GroupedOptions(WithKvScales, BitsByLayer):
    """Options shared by all methods with grouped codes."""

    group_size: int | Literal["auto"] = Field(
        "auto",
        description="input columns that share a scale; -1: whole row; auto: largest of 128, 64, 32 that divides",
    )
    head_bits: Literal[4, 8] | None = Field(
        None, description="bits of an output head not tied to the embedding; default: 16"
    )


def targeted(options: BitsByLayer) -> bool:
    """Return whether layer bits are chosen automatically, for a target size or divergence."""
    return options.target_bpw is not None or options.target_kld is not None


def base_bits(job: Job[BitsByLayer]) -> int:
    """Return the recipe's bits; with bits `auto`, the largest width that a layer may get."""
    return max(job.options.target_bits or WIDTHS) if job.bits == AUTO else int(job.bits)


def module_of(name: str) -> str:
    """Return the module name of a weight, without the suffix `.weight`."""
    return name.removesuffix(".weight")


def check_bits(job: Job[BitsByLayer], layout: Layout) -> Checked[Layout]:
    """Check bits and layout of the job with the format; apply `layer_bits` if the user gave them.

    Raises RecipeError for contradictory options and unreachable targets.
    """
    options = job.options
    target = given_target(job, ("target_bpw", "target_kld"), ("layer_bits",), "bits")
    if options.target_bits is not None and (target is None or not set(options.target_bits) <= set(WIDTHS)):
        known = ", ".join(map(str, WIDTHS))
        raise RecipeError(
            f"target_bits = {', '.join(map(str, options.target_bits)) or 'none'}: give one or more of {known}, "
            f"with bits auto and a target"
        )
    if options.layer_bits:
        bits = _given(job, options.layer_bits)
        _refuse_parted(job, bits)
        return job.check_layout(with_bits(job, layout, bits))
    if target is None:
        return job.check_layout(layout)
    checked = job.check_layout(replace(layout, choices=tuple(sorted(set(options.target_bits or WIDTHS)))))
    hidden = int(job.skeleton.model.get_input_embeddings().embedding_dim)
    flows = work_bytes(job.recipe.calibration, len(job.skeleton.blocks), hidden)
    return replace(checked, nbytes=checked.nbytes - _refuse_far(job, checked.plan) + flows)


def _given(job: Job, patterns: Mapping[str, int]) -> dict[str, int]:
    """Return each weight's bits from the user's patterns; the last matching pattern wins. Raises RecipeError."""
    if wrong := [f"{pattern}={bits}" for pattern, bits in patterns.items() if bits not in WIDTHS]:
        raise RecipeError(f"layer_bits: {wrong[0]} gives unknown bits. Layers can have {', '.join(map(str, WIDTHS))}")
    names = list(job.skeleton.linears())
    bits = {} if job.bits == AUTO else dict.fromkeys(names, int(job.bits))
    for pattern, width in patterns.items():
        try:
            found = [name for name in names if pattern == module_of(name) or re.search(pattern, module_of(name))]
        except re.error as error:
            raise RecipeError(f"layer_bits: the pattern {pattern!r} is not a regular expression: {error}.") from None
        if not found:
            raise RecipeError(f"layer_bits: the pattern {pattern!r} matches no layer's name, such as {names[0]}.")
        bits |= dict.fromkeys(found, width)
    if bare := [module_of(name) for name in names if name not in bits]:
        raise RecipeError(f"layer_bits has no bits for {bare[0]}. Add a pattern for it, or give --bits.")
    if job.bits != AUTO and int(job.bits) not in bits.values():
        raise RecipeError(f"layer_bits covers all layers, so none has {job.bits} bits. Give --bits auto.")
    return bits


def _refuse_parted(job: Job, bits: Mapping[str, int]) -> None:
    """Raise RecipeError if layers that engines fuse have different bits."""
    for names in layers_of_one_input(job.skeleton, job.source.config):
        first = names[0]
        if other := next((name for name in names if bits[name] != bits[first]), None):
            raise RecipeError(
                f"layer_bits gives {module_of(first)} {bits[first]} bits and {module_of(other)} {bits[other]}: engines "
                "fuse layers with the same input, and experts. Give them the same bits."
            )


def with_bits(job: Job, layout: Layout, bits: Mapping[str, int]) -> Layout:
    """Return the layout with the given bits for each weight name."""
    weights: Counter[int] = Counter()
    for name, (rows, columns) in job.skeleton.linears().items():
        weights[bits[name]] += rows * columns
    most = max(weights, key=lambda width: (weights[width], width))
    return replace(layout, bits=most, layer_bits=dict(bits) if len(weights) > 1 else {}, choices=())


def size_in_bits(shape: tuple[int, int], bits: int, layout: Layout) -> int:
    """Return the stored size in bits of a layer (N, K), including scales and zero points."""
    rows, columns = shape
    groups = 1 if layout.group_size == -1 else columns // int(layout.group_size)
    return rows * columns * bits + rows * groups * (SCALE_BITS + (0 if layout.symmetric else bits))


def _refuse_far(job: Job[BitsByLayer], layout: Layout) -> int:
    """Return by how many bytes the target is smaller than the largest choice; raise RecipeError if unreachable."""
    asked, shapes = job.options.target_bpw, job.skeleton.linears().values()
    if asked is None:
        return 0
    weights = sum(rows * columns for rows, columns in shapes)
    low, high = (
        sum(size_in_bits(shape, bits, layout) for shape in shapes) / weights
        for bits in (layout.choices[0], layout.choices[-1])
    )
    if not low <= asked <= high:
        least, most = math.ceil(low * 1e4) / 1e4, math.floor(high * 1e4) / 1e4
        group = "whole rows" if layout.group_size == -1 else f"groups of {layout.group_size}"
        raise RecipeError(
            f"target_bpw = {asked:g} is out of reach: with bits {', '.join(map(str, layout.choices))} and {group} the "
            f"linear layers of {job.source.model} have from {least:g} to {most:g} bits per weight, including scales; "
            "embedding and head do not count."
        )
    return int((high - asked) * weights / 8)


def choose_bits(job: CheckedJob[BitsByLayer, Layout], run: Run) -> Layout:
    """Return the job's layout; with a target, choose each layer's bits and note the choice.

    Raises RecipeError if, by the estimate, no choice reaches the target.
    """
    if not targeted(job.options):
        return job.checked.plan
    bits: dict[str, int] = {}
    if job.shards.rank == 0:
        found: Any = run.findings.options.get(OPTION)  # chosen by an interrupted run
        bits = _searched(job, run) if found is None else {f"{name}.weight": int(width) for name, width in found.items()}
    bits = job.shards.from_leader(bits)
    run.findings.options[OPTION] = {module_of(name): width for name, width in bits.items()}
    write_recipe(job, run, {OPTION: run.findings.options[OPTION]})
    return with_bits(job, job.checked.plan, bits)


def _searched(job: CheckedJob[BitsByLayer, Layout], run: Run) -> dict[str, int]:
    layout = job.checked.plan
    shapes, kinds = job.skeleton.linears(), tuple(map(str, layout.choices))
    maker = f"codes {VERSION}, groups of {layout.group_size}, {layout.symmetric}, {layout.least_zero}"

    def changed(kind: str, weight: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
        if importance is not None:
            importance = importance + 1e-6 * importance.mean() + 1e-30
        how = {"symmetric": layout.symmetric, "least_zero": layout.least_zero, "search": True, "importance": importance}
        return round_to_nearest(weight, int(layout.group_size), int(kind), **how).dense()

    scores = kept_sensitivities(job, run, dict.fromkeys(shapes, kinds), changed, maker, TRIED_ROWS)
    units = layers_of_one_input(job.skeleton, job.source.config)
    # Bits of storage and nats per token, by unit of layers with the same bits and by choice.
    sizes = [
        [sum(size_in_bits(shapes[name], bits, layout) for name in unit) for bits in layout.choices] for unit in units
    ]
    damage = [[sum(scores[name][kind] for name in unit) for kind in kinds] for unit in units]
    asked, weights = job.options.target_bpw, sum(rows * columns for rows, columns in shapes.values())
    try:
        if asked is not None:
            chosen = least_damage(sizes, damage, int(asked * weights))
        else:
            chosen = fewest_bytes(sizes, damage, job.options.target_kld or 0.0)
    except ValueError:
        least = sum(min(row) for row in damage)
        raise RecipeError(
            f"target_kld = {job.options.target_kld:g} is out of reach: with bits {', '.join(kinds)} the estimate for "
            f"{job.source.model} is {least:.4g} nats per token or more. Give a higher target."
        ) from None
    bits = {name: layout.choices[k] for names, k in zip(units, chosen, strict=True) for name in names}
    size = sum(row[k] for row, k in zip(sizes, chosen, strict=True))
    harm = sum(row[k] for row, k in zip(damage, chosen, strict=True))
    counts = Counter(bits.values())
    run.findings.note(
        f"bits chosen by sensitivity: {size / weights:.3f} bits per weight of the linear layers "
        f"({', '.join(f'{counts[width]} layers of {width} bits' for width in sorted(counts))}), estimated divergence "
        f"{harm:.4f} nats per token before error feedback"
    )
    return {name: bits[name] for name in shapes}


def _memory(job: CheckedJob[BitsByLayer, Layout], shapes: Shapes) -> Mapping[str, int]:
    return peak_bytes(job.recipe.calibration, shapes) if targeted(job.options) else {}


BIT_SEARCH = BitSearch(choose_bits, _memory)
