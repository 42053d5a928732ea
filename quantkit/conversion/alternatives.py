"""Which methods take a model that one method refuses: found by asking their own checks, so the hint is never wrong."""

from __future__ import annotations

from quantkit.contracts.method import Job, Method
from quantkit.contracts.registry import find_format, methods
from quantkit.errors import QuantkitError
from quantkit.recipe import ConvertRecipe


def alternatives_to(job: Job, but: str = "") -> str:
    """A sentence that names METHOD:BITS whose checks take the job's source with default options; not the method `but`.

    It costs all their checks, so it belongs into errors only.
    """
    others = [method for name, method in methods().items() if name != but and method.makes != "floats"]
    names = [f"{method.name}:{bits}" for method in others if (bits := _accepted_bits(method, job))]
    if not names:
        return "No other method takes this model."
    return f"Methods that take this model: {', '.join(names)}."


def _accepted_bits(method: Method, job: Job) -> str | None:
    """The default bits, or else the first ones, that the method's check takes."""
    for bits in sorted(method.bits, key=lambda bits: bits != method.default_bits):
        recipe = ConvertRecipe(model=job.source.model, method=method.name, bits=bits)
        kind = find_format(method.kind_of(bits)[1])
        try:
            method.check(job.changed(recipe=recipe, method=method, format=kind, options=method.parse_options({})))
        except QuantkitError:
            continue
        return bits
    return None
