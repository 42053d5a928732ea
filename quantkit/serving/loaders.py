"""What loads what: every kind of every format against the engines that judge and those that only serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.contracts.format import Format, Kind
from quantkit.contracts.registry import engines, formats
from quantkit.serving.servers import SERVERS

SERVED = {"exllama": SERVERS["tabbyapi"]}  # engines that have only a server here, by the names of their users


@dataclass(frozen=True)
class Loaded:
    """Whether an engine takes one kind of a format: `refusal` is the reason why not, `since` the oldest version tried.

    An empty refusal and an empty version: it should, and nobody has tried it here. `only` says where.
    """

    refusal: str = ""
    since: str = ""
    only: str = ""

    def __str__(self) -> str:
        """As a cell of a table."""
        if self.refusal:
            return "no"
        return f"{self.only} only" if self.only else f"yes ({self.since})" if self.since else "yes"


def names() -> tuple[str, ...]:
    """All engines, our own reader first."""
    known = sorted(engines(), key=lambda name: name != "reference")
    return (*known, *SERVED)


@dataclass(frozen=True)
class Row:
    """Kinds of a format that all engines treat alike: `kinds` names them, `loaded` says how, by engine."""

    format: str
    kinds: str
    loaded: dict[str, Loaded]

    def takers(self) -> Iterator[str]:
        """The engines that take them, each with the version or the place."""
        for name, found in self.loaded.items():
            if not found.refusal:
                yield name + (f" ({remark})" if (remark := found.only or found.since) else "")


def table() -> Iterator[Row]:
    """Every kind of every format, those of other bits together where the engines make no difference."""
    for stored in formats().values():
        alike: dict[tuple[str, tuple[Loaded, ...]], list[str]] = {}
        for kind in stored.kinds:
            loaded = tuple(_loaded(stored, kind, name) for name in names())
            alike.setdefault((kind.words, loaded), []).append(kind.bits)
        for (words, loaded), bits in alike.items():
            kinds = ", ".join(bits) + (f": {words}" if words else "")
            yield Row(stored.name, kinds, dict(zip(names(), loaded, strict=True)))


def _loaded(stored: Format, kind: Kind, name: str) -> Loaded:
    server = SERVED.get(name)
    reason = stored.refusals(kind.quantization).get(server.name if server else name)
    taken = stored.name in server.opens[0] if server else name in stored.engines
    if reason or not taken:
        return Loaded(reason or (server.opens[1] if server else engines()[name].opens))
    return Loaded(since=stored.loaded_by(name).since, only=kind.only.get(name, ""))
