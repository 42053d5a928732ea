"""The first sentence of a page: the smallest copy within a limit of KLD, the best of a size, the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from quantkit.report.best import HIGHER, best
from quantkit.report.page.markup import Html, joined, tag
from quantkit.report.page.view import View
from quantkit.report.records import Measurement, Report
from quantkit.report.sheet import Part
from quantkit.report.table import megabytes

QUALITY = {"kld": "KLD", "perplexity": "perplexity", "word_perplexity": "word perplexity"}
SPEEDS = {"ms_per_token@": "ms/token", "tg": "tokens/s"}
SHARE = 1 / 3  # of float16, where no limit is given
CERTAIN = 1.96  # standard errors
UNSURE = ", though not beyond the error of the difference"


def answer(view: View) -> Html:
    """A paragraph for each model."""
    return joined(tag("p", joined(_of_model(view, model)), class_="answer") for model in view.sheet.models)


def _of_model(view: View, model: str) -> Iterator[str]:
    copies = [report for report in view.reports[model] if report.model.method is not None]
    if not copies:
        yield joined(["No copy of ", tag("b", model), " was measured."])
        return
    yield joined(["Of ", tag("b", model), ": "])
    yield joined([*_smallest(view, model, copies), *_best(view, model, copies)])
    for part in view.sheet.of(model):
        yield joined(_fastest(view, part))


def _smallest(view: View, model: str, copies: list[Report]) -> Iterator[str]:
    limit = view.limits.kld
    having = [(report, kld) for report in copies if (kld := report.find("kld")) is not None]
    if not having:
        yield "KLD from the source was not measured."
        return
    within = [(r, kld) for r, kld in having if kld.value <= limit and r.find("weight_bytes")]
    if within:
        report, kld = min(within, key=lambda pair: _size(pair[0]))
        near = kld.value + CERTAIN * (kld.stderr or 0) > limit
        yield from (f"the smallest copy with a KLD of at most {limit:g} is ", _named(view, model, report, kld))
        yield ", with the limit inside its error." if near else "."
        return
    report, kld = min(having, key=lambda pair: pair[1].value)
    yield f"no copy has a KLD of at most {limit:g}; the nearest is "
    yield from (_named(view, model, report, kld), ".")


def _best(view: View, model: str, copies: list[Report]) -> Iterator[str]:
    given = view.limits.nbytes
    limit = _third(view.reports[model]) if given is None else given
    name = next((name for name in QUALITY if any(report.find(name) for report in copies)), None)
    if limit is None or name is None:
        return
    small = [report for report in copies if report.find("weight_bytes") and _size(report) <= limit]
    most = megabytes(limit) + (" (a third of float16)" if given is None else "")
    report, sure = _first(small, lambda report: report.find(name))
    if report is None:
        yield f" No copy has at most {most}."
        return
    figure = report.find(name)
    yield f" The best of at most {most} is "
    yield from (_named(view, model, report, figure), "." if sure else f"{UNSURE}.")


def _fastest(view: View, part: Part) -> Iterator[str]:
    copies = [report for report in part.table.reports if report.model.method is not None]
    found = _speed_of(copies)
    if found is None:
        return
    name, unit = found
    report, sure = _first(copies, lambda report: report.find(name))
    if report is None:
        return
    machine = f" on {part.machine}" if len(view.sheet.machines) > 1 else ""
    figure = report.find(name)
    cores = name.rpartition("@")[2]
    yield f" The fastest{machine} is "
    yield view.link(part.table.model, report.model.label)
    yield f" ({figure.value if figure else 0:.3g} {unit} @ {cores} thread{'s' if cores != '1' else ''})"
    yield "." if sure else f"{UNSURE}."


def _speed_of(copies: list[Report]) -> tuple[str, str] | None:
    """The figure of speed that most copies have, at the most threads, and its unit."""
    for prefix, unit in SPEEDS.items():
        names = [m.name for r in copies for m in r.measurements if m.name.startswith(prefix) and "@" in m.name]
        if names:
            most = max(map(names.count, names))
            return max((n for n in names if names.count(n) == most), key=lambda n: int(n.rpartition("@")[2])), unit
    return None


def _first(reports: Sequence[Report], figure_of: Callable[[Report], Measurement | None]) -> tuple[Report | None, bool]:
    """The report with the best figure, and whether it is the best beyond the error; it is where it is alone."""
    having = [(report, figure) for report in reports if (figure := figure_of(report)) is not None]
    if not having:
        return None, False
    sign = -1 if having[0][1].name.startswith(HIGHER) else 1
    place = min(range(len(having)), key=lambda i: sign * having[i][1].value)
    return having[place][0], len(having) == 1 or best([figure for _, figure in having]) == place


def _named(view: View, model: str, report: Report, figure: Measurement | None) -> Html:
    shown = [megabytes(_size(report))] if report.find("weight_bytes") else []
    if figure is not None:
        digits = 4 if figure.name == "kld" else 2
        error = "" if figure.stderr is None else f" ± {figure.stderr:.{digits}f}"
        shown.append(f"{QUALITY[figure.name]} {figure.value:.{digits}f}{error}")
    return joined([view.link(model, report.model.label), f" ({', '.join(shown)})"])


def _size(report: Report) -> float:
    found = report.find("weight_bytes")
    return found.value if found else 0.0


def _third(reports: list[Report]) -> float | None:
    """A third of the bytes that the model has in float16."""
    for report in reports:
        bits = report.find("bits_per_weight")
        if bits and bits.value and report.find("weight_bytes"):
            return _size(report) * 16 / bits.value * SHARE
    return None
