"""Which methods take a model that one method refuses: found by asking their own checks, so the hint is never wrong."""

from __future__ import annotations

from contextvars import ContextVar

from quantkit.contracts.job import Job
from quantkit.contracts.method import Method
from quantkit.contracts.registry import methods
from quantkit.errors import QuantkitError
from quantkit.formats.source import Source
from quantkit.recipe import ConvertRecipe

_asking: ContextVar[bool] = ContextVar("asking", default=False)


def instead(source: Source, but: str = "") -> str:
    """A sentence that names METHOD:BITS whose checks take `source` with their default options; never the method `but`.

    It costs all their checks, so it belongs into errors only. A check that is asked itself asks no further.
    """
    if _asking.get():
        return ""
    token = _asking.set(True)
    try:
        found = [
            f"{name}:{bits}" for name, method in methods().items() if name != but and (bits := _bits(method, source))
        ]
    finally:
        _asking.reset(token)
    if not found:
        return "No other method takes this model."
    return f"Methods that take this model: {', '.join(found)}."


def _bits(method: Method, source: Source) -> str | None:
    """The default bits, or else the first ones, that the method's check takes."""
    for bits in sorted(method.bits, key=lambda bits: bits != method.default_bits):
        recipe = ConvertRecipe(model=source.model, method=method.name, bits=bits)
        try:
            method.check(Job(source=source, recipe=recipe, options=method.parse_options({})))
        except QuantkitError:
            continue
        return bits
    return None
