"""What the parts of a page share: the sheet, its rows, the artifacts that are there, and where each has its section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from quantkit.artifact import Artifact
from quantkit.report.page.markup import Html, tag
from quantkit.report.records import Report
from quantkit.report.sheet import Row, Sheet

MAX_KLD = 0.1  # nats a target


@dataclass(frozen=True)
class Limits:
    """What the first sentence goes by: the most KLD in nats, and the most bytes (default: a third of float16)."""

    kld: float = MAX_KLD
    nbytes: float | None = None


def _nothing(_format: str) -> str | None:
    return None


@dataclass(frozen=True)
class View:
    """A sheet with `artifacts` by their digests; `server` names the server of a format, None where there is none."""

    sheet: Sheet
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    limits: Limits = Limits()
    server: Callable[[str], str | None] = _nothing

    @cached_property
    def rows(self) -> dict[str, list[Row]]:
        """The rows of each model."""
        return {model: self.sheet.rows(model) for model in self.sheet.models}

    @cached_property
    def reports(self) -> dict[str, list[Report]]:
        """The variants of each model."""
        return {model: self.sheet.reports(model) for model in self.sheet.models}

    @cached_property
    def places(self) -> dict[tuple[str, str], str]:
        """The section of each variant by (model, label)."""
        pairs = [(model, report.model.label) for model, reports in self.reports.items() for report in reports]
        return {pair: f"v{i}" for i, pair in enumerate(pairs)}

    def link(self, model: str, label: str, shown: str | None = None) -> Html:
        """A link to the section of a variant."""
        return tag("a", label if shown is None else shown, href=f"#{self.places[model, label]}")
