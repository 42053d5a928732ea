"""Each layer's bits chosen for a size or a divergence, for whatever method makes grouped codes.

The harm of each width in each layer is estimated from a few calibration sequences (calibration/sensitivity.py): that of
rounding to the nearest code of a grid that is searched as GPTQ's is. An integer programme shares out the bits
(numerics/allocation.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from quantkit.calibration.sensitivity import Scores, kept_sensitivities, peak_bytes
from quantkit.contracts.format import Layout
from quantkit.contracts.method import Choice, Job, Shapes
from quantkit.contracts.run import Run
from quantkit.errors import RecipeError
from quantkit.methods._budget.layer_bits import BitsByLayer, module_of, size_in_bits, targeted, with_bits
from quantkit.methods._budget.targets import write_recipe
from quantkit.models.stand_in import layers_of_one_input
from quantkit.numerics.allocation import fewest_bytes, least_damage
from quantkit.numerics.grid import fit_grid, on_grid
from quantkit.system.ranks.group import from_leader, leads

VERSION = 1  # of what is made of weights; another one makes kept scores worthless
OPTION = "layer_bits"
TRIED_ROWS = 256  # of a layer in the estimate


def choose(job: Job, run: Run) -> Job:
    """The job with each layer's bits in its plan, where they are to be chosen; what was chosen is told.

    Raises RecipeError where the target is out of reach of the estimate.
    """
    options: BitsByLayer = job.options
    if not targeted(options):
        return job
    kept = run.findings.options.get(OPTION)
    bits = from_leader((_measured(job, run) if kept is None else dict(_numbers(kept))) if leads() else {})
    run.findings.options[OPTION] = {module_of(name): width for name, width in bits.items()}
    write_recipe(job, run, {OPTION: run.findings.options[OPTION]})
    return job.changed(checked=replace(job.checked, plan=with_bits(job, job.checked.plan, bits)))


def _numbers(kept: object) -> Mapping[str, int]:
    """What an interrupted run has chosen, by the weights' names."""
    assert isinstance(kept, dict)  # which is how it is kept
    return {f"{module}.weight": int(bits) for module, bits in kept.items()}


def _measured(job: Job, run: Run) -> dict[str, int]:
    layout: Layout = job.checked.plan
    shapes, kinds = job.skeleton.linears(), tuple(map(str, layout.choices))
    maker = f"codes {VERSION}, groups of {layout.group_size}, {layout.symmetric}, {layout.least_zero}"

    def changed(kind: str, weight: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
        return rounded(weight, int(kind), layout, importance)

    scores = kept_sensitivities(job, run, dict.fromkeys(shapes, kinds), changed, maker, TRIED_ROWS)
    units = layers_of_one_input(job.skeleton, job.source.config)
    sizes, damage = programme(units, shapes, scores, layout)
    asked, weights = job.options.target_bpw, sum(rows * columns for rows, columns in shapes.values())
    try:
        if asked is not None:
            chosen = least_damage(sizes, damage, int(asked * weights))
        else:
            chosen = fewest_bytes(sizes, damage, job.options.target_kld)
    except ValueError:
        least = sum(min(row) for row in damage)
        raise RecipeError(
            f"target_kld = {job.options.target_kld:g} is out of reach: with bits {', '.join(kinds)} the estimate for "
            f"{job.source.model} is {least:.4g} nats a token or more. Ask for more."
        ) from None
    bits = {name: layout.choices[k] for names, k in zip(units, chosen, strict=True) for name in names}
    size = sum(row[k] for row, k in zip(sizes, chosen, strict=True))
    harm = sum(row[k] for row, k in zip(damage, chosen, strict=True))
    counts = Counter(bits.values())
    run.findings.note(
        f"bits chosen by sensitivity: {size / weights:.3f} bits per weight of the linear layers "
        f"({', '.join(f'{counts[width]} layers of {width} bits' for width in sorted(counts))}), estimated divergence "
        f"{harm:.4f} nats a token before error feedback"
    )
    return {name: bits[name] for name in shapes}


def rounded(weight: torch.Tensor, bits: int, layout: Layout, importance: torch.Tensor | None) -> torch.Tensor:
    """What becomes of a weight (N, K) float32 on the nearest codes; `importance` (K,) is the inputs' mean square."""
    group = weight.shape[1] if layout.group_size == -1 else int(layout.group_size)
    if importance is not None:
        importance = importance + 1e-6 * importance.mean() + 1e-30
    grid = fit_grid(
        weight, group, bits, symmetric=layout.symmetric, importance=importance, search=True,
        least_zero=layout.least_zero,
    )  # fmt: skip
    return on_grid(weight, grid, group).dense()


def programme(
    units: list[list[str]], shapes: Mapping[str, tuple[int, int]], scores: Scores, layout: Layout
) -> tuple[list[list[int]], list[list[float]]]:
    """Bits of storage and nats a token, by unit of layers that have the same bits and by choice."""
    sizes = [
        [sum(size_in_bits(shapes[name], bits, layout) for name in names) for bits in layout.choices] for names in units
    ]
    damage = [[sum(scores[name][str(bits)] for name in names) for bits in layout.choices] for names in units]
    return sizes, damage


def memory(job: Job, shapes: Shapes) -> Mapping[str, int]:
    """Bytes of the estimate's phases."""
    return peak_bytes(job.recipe.calibration, shapes) if targeted(job.options) else {}


CHOICE = Choice(choose, memory)
