"""Render a table as a self-contained HTML page: recommendation, matrix, plot, all figures, variants.

page.html, page.css and page.js are jinja2 templates that escape all values. The content security policy allows only the
page's own script and loads nothing.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from jinja2 import Environment
from markupsafe import Markup, escape

from quantkit.errors import ArtifactError, one_line
from quantkit.records.artifact import MANIFEST, Artifact, open_artifact
from quantkit.records.report import NAMES, Measurement, Report, noise_of
from quantkit.report.card import templates
from quantkit.report.statistics import HIGHER, best
from quantkit.report.table import COLOURS, EMPTY, KLD, LEGEND, LONGEST, PERCENTILE, QUALITY, Table, split_label
from quantkit.system.processor import threads
from quantkit.system.sizes import megabytes

MOST = 1_000_000  # bytes of a page; in a larger one the JSON omits the windows' sums
LONGEST_CODE = 1 << 18  # characters of a command to copy
LONGEST_LABEL = 200  # characters of a name in the picture
STEPS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # KLD in nats at which the colour changes
ACROSS = ("weight_bytes", "bits_per_weight", "ms_per_token@", "peak_rss_bytes", "device_peak_bytes")
UNITS = {"weight_bytes": "MB", "peak_rss_bytes": "MB", "device_peak_bytes": "MB", "bits_per_weight": "bits"}
SPEEDS = {"ms_per_token@": "ms/token", "tg": "tokens/s"}
CERTAIN = 1.96  # standard errors
WORSE = 1.2  # times the source's perplexity; above it the recommendation warns
WORST = 5  # windows
BINS, WIDTH, HEIGHT = 16, 320, 70  # of a histogram
WITHOUT_SUMS = "The JSON to save omits the windows' sums, to keep this page below 1 MB."


def page(
    table: Table,
    artifacts: Mapping[str, Artifact] | None = None,
    remarks: Iterable[str] = (),
    max_kld: float = 0.1,
    max_bytes: float | None = None,
    server: Callable[[str], str | None] = lambda _format: None,
) -> str:
    """Return the HTML page.

    `artifacts` are by digest; `remarks` appear below the table's notes. The page recommends the smallest copy with a
    KLD of at most `max_kld` nats, and the best copy of at most `max_bytes` (default: a third of float16). `server`
    returns the name of a format's server, or None.
    """
    templates = environment()
    style = Markup(templates.get_template("page.css").render(colours=COLOURS))
    script = Markup(templates.get_template("page.js").render())
    rows = {model: {row.title: row for row in table.rows(model) if any(row.figures)} for model in table.models}
    divergences = {model: found[KLD] for model, found in rows.items() if KLD in found}
    variants = [(model, report) for model in table.models for report in table.variants(model)]
    places = {(model, report.model.label): f"v{i}" for i, (model, report) in enumerate(variants)}
    notes = [*table.notes(), *remarks]
    template = templates.get_template("page.html")
    parts = {
        "style": style,
        "script": script,
        "hashes": {"style": _policy_hash(style), "script": _policy_hash(script)},
        "table": table,
        "rows": rows,
        "titles": list(dict.fromkeys(title for found in rows.values() for title in found)),
        "divergences": divergences,
        "diverging": [i for i in range(len(table.columns)) if any(row.figures[i] for row in divergences.values())],
        "variants": variants,
        "places": places,
        "artifacts": artifacts or {},
        "limit": f"{max_kld:g}",
        "answers": {model: answer(table, model, max_kld, max_bytes) for model in table.models},
        "server": server,
        "data": plot_data(table, places),
        "csv": _data_url(table.to_csv()),
    }
    whole = template.render(parts, notes=notes, json=_data_url(table.to_json()))
    if len(whole.encode()) <= MOST:
        return whole
    return template.render(parts, notes=[*notes, WITHOUT_SUMS], json=_data_url(_without_sums(table).to_json()))


def find_artifacts(places: Iterable[str]) -> tuple[dict[str, Artifact], list[str]]:
    """Return the artifacts of comparisons and sweeps at `places`, by digest, and remarks on unreadable ones.

    Only manifests are read. A report belongs to the artifact with the same digest.
    """
    found: dict[str, Artifact] = {}
    remarks = []
    for place in places:
        path = split_label(place)[1]
        root = path if path.is_dir() else path.parent
        for pattern in (f"artifacts/*/{MANIFEST}", f"models/*/artifacts/*/{MANIFEST}"):
            for manifest in sorted(root.glob(pattern)):
                try:
                    artifact = open_artifact(manifest.parent)
                    found.setdefault(artifact.digest, artifact)
                except ArtifactError as error:
                    remarks.append(str(error))
    return found, list(dict.fromkeys(remarks))


def environment() -> Environment:
    """Return the page's jinja environment, which escapes every value and puts it on one line."""
    made = templates(lambda text: one_line(text, LONGEST), html=True)
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.globals |= {"EMPTY": EMPTY, "LEGEND": LEGEND, "PERCENTILE": PERCENTILE, "STEPS": STEPS}
    made.globals |= {"divergence": divergence, "fixed": "{:z.4f}".format, "in_words": in_words}
    made.filters |= {"code": _code, "yaml": lambda value: yaml.safe_dump(value, sort_keys=False, width=100)}
    return made


def _code(text: str) -> Markup:
    """Return lines for the user to copy, at full length."""
    return Markup("\n").join(escape(one_line(line, LONGEST_CODE)) for line in text.rstrip("\n").split("\n"))


def _policy_hash(inside: str) -> str:
    """Return an element's hash for the content security policy."""
    return base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()


def _data_url(content: str) -> Markup:
    """Return `content`, gzipped, as a data URL."""
    packed = gzip.compress(content.encode("utf-8", "backslashreplace"), mtime=0)
    return Markup(f"data:application/gzip;base64,{base64.b64encode(packed).decode()}")


def _without_sums(table: Table) -> Table:
    """Return the table without per-window sums, and without fingerprints, which depend on them."""
    reports = []
    for report in table.reports:
        bare = tuple(m.model_copy(update={"sums": ()}) for m in report.measurements)
        reports.append(report.model_copy(update={"measurements": bare, "fingerprint": None}))
    return Table(tuple(reports), table.machines)


def in_words(m: Measurement) -> str:
    """Format a figure for use in a sentence."""
    if m.name == "weight_bytes":
        return megabytes(m.value)
    return f"{NAMES.get(m.name, m.name.replace('_', ' '))} {m.text(4 if m.name == 'kld' else 2)}"


def _value(report: Report, name: str) -> float:
    figure = report.find(name)
    return 0.0 if figure is None else figure.value


def answer(table: Table, model: str, max_kld: float, max_bytes: float | None) -> dict[str, Any]:
    """Return a model's recommendation: the smallest copy within the KLD limit, or the nearest; the best copy
    within `max_bytes`, whether it is significantly best, and caveats; the fastest copy on each machine.
    """
    variants = table.variants(model)
    copies = [report for report in variants if report.model.method is not None]
    diverging = [(report, kld) for report in copies if (kld := report.find("kld"))]
    within = [(report, kld) for report, kld in diverging if kld.value <= max_kld and _value(report, "weight_bytes")]
    found: dict[str, Any] = {
        "copies": copies,
        "fastest": list(_fastest(table, model)),
        "smallest": None,
        "best": None,
        "most": "",
    }
    found["nearest"] = min(diverging, key=lambda pair: pair[1].value)[0] if diverging else None
    if within:
        report, kld = min(within, key=lambda pair: _value(pair[0], "weight_bytes"))
        found |= {"smallest": report, "near": kld.value + CERTAIN * (kld.stderr or 0) > max_kld}
    halves = (r for r in variants if _value(r, "bits_per_weight"))
    third = next((_value(r, "weight_bytes") * 16 / _value(r, "bits_per_weight") / 3 for r in halves), 0.0)
    limit = third if max_bytes is None else max_bytes
    name = next((name for name in ("kld", *QUALITY) if any(report.find(name) for report in copies)), None)
    if name is None or not limit:
        return found
    best_copy, sure = _best_report([r for r in copies if 0 < _value(r, "weight_bytes") <= limit], name)
    against = []
    if best_copy is not None:
        if _value(best_copy, "kld") > max_kld:
            against.append(f"its KLD is above {max_kld:g}")
        level = next((_value(r, "perplexity") for r in variants if r.model.method is None), 0.0)
        if level and (times := _value(best_copy, "perplexity") / level) >= WORSE:
            against.append(f"its perplexity is {times:.1f} times the source's")
    about = {"most": megabytes(limit), "third": max_bytes is None, "by": name, "sure": sure, "against": against}
    return found | {"best": best_copy, **about}


def _fastest(table: Table, model: str) -> Iterator[tuple[str, Report, str, bool]]:
    """Yield (machine, fastest copy, speed, whether it is certain), compared by the figure that most copies have."""
    for part in table.parts:
        copies = [report for report in part.reports if report.model.method is not None and part.model == model]
        names = [m.name for report in copies for m in report.measurements if m.name.startswith(tuple(SPEEDS))]
        for prefix, unit in SPEEDS.items():
            timed = [name for name in names if name.startswith(prefix) and "@" in name]
            if timed:
                name = max(timed, key=lambda name: (timed.count(name), int(name.rpartition("@")[2])))
                report, sure = _best_report(copies, name)
                if report is not None:
                    speed = f"{_value(report, name):.3g} {unit} @ {threads(int(name.rpartition('@')[2]))}"
                    yield part.machine, report, speed, sure
                break


def _best_report(reports: Sequence[Report], name: str) -> tuple[Report | None, bool]:
    """Return the report with the best figure, and whether it is the only one or significantly the best."""
    having = [(report, figure) for report in reports if (figure := report.find(name)) is not None]
    if not having:
        return None, False
    sign = -1 if HIGHER.match(name) else 1
    place = min(range(len(having)), key=lambda i: sign * having[i][1].value)
    return having[place][0], len(having) == 1 or best([figure for _, figure in having]) == place


def divergence(report: Report) -> dict[str, Any] | None:
    """Return a variant's divergence from the source: all figures, and per-window values if recorded."""
    kld, w = report.find("kld"), report.windows
    if kld is None:
        return None
    figures = [(f"KLD, {name}", f"{value:z.5f}") for name, value in kld.details.items() if isinstance(value, float)]
    others = (report.find(name) for name in NAMES if name not in ("kld", "same_top_p"))
    figures += [(NAMES[m.name], m.text(5)) for m in others if m is not None]
    count = len(kld.sums)
    if not count:
        return {"figures": figures, "histogram": None}
    means = w.documents is None and count == w.windows and kld.n and kld.n % count == 0
    values = [total * count / (kld.n or 1) for total in kld.sums] if means else list(kld.sums)
    worst = []
    for i in sorted(range(count), key=lambda i: -values[i])[:WORST]:
        tokens = "" if w.documents is not None else f" (tokens {i * w.n_ctx:,} to {(i + 1) * w.n_ctx - 1:,})"
        worst.append(f"{i + 1}{tokens}: {values[i]:z.4f}")
    title = f"{'mean KLD of a window' if means else 'KLD summed over a window or page'}, {count} windows"
    return {"figures": figures, "histogram": histogram(values), "title": title, "worst": "; ".join(worst)}


def histogram(values: Sequence[float]) -> dict[str, Any]:
    """Return a histogram of values (W,) as an SVG path with labels; its axis starts at 0 or a negative minimum."""
    low, high = min(0.0, *values), max(values)
    width, counts = high - low, [0] * BINS
    for value in values:
        counts[min(BINS - 1, math.floor((value - low) / width * BINS)) if 0 < width < math.inf else 0] += 1
    wide, most = WIDTH / BINS, max(counts)
    bars = "".join(
        f"M{i * wide + 1:g} {HEIGHT}v-{count / most * (HEIGHT - 4):.3g}h{wide - 2:g}V{HEIGHT}z"
        for i, count in enumerate(counts)
        if count
    )
    label = f"from {min(values):z.4f} to {high:z.4f}, median {sorted(values)[len(values) // 2]:z.4f}"
    return {"bars": bars, "low": f"{low:.3g}", "high": f"{high:.3g}", "label": label, "wide": WIDTH, "tall": HEIGHT}


def plot_data(table: Table, places: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """Return the plot's axes, points with standard errors, and noise floors."""

    def line(name: str) -> str:
        return one_line(name, LONGEST_LABEL)

    axes: dict[bool, dict[str, str]] = {True: {}, False: {}}  # across or upwards
    points = []
    for model in table.models:
        drawable = []
        for row in table.rows(model):
            name = next((figure.name for figure in row.figures if figure), "")
            if row.title != PERCENTILE and name.startswith((*ACROSS, *QUALITY)):
                unit = "nats" if name == "kld" else UNITS.get(name, "ms" if name.startswith("ms_") else "")
                axes[name.startswith(ACROSS)].setdefault(line(row.title), unit)
                drawable.append((line(row.title), 1e-6 if unit == "MB" else 1.0, row.figures))
        for report in table.variants(model):
            i, label, method = table.columns.index(report.model.label), report.model.label, report.model.method
            values = {}
            for title, scale, figures in drawable:
                if (m := figures[i]) is not None:
                    error = None if m.stderr is None or not math.isfinite(m.stderr) else m.stderr * scale
                    values[title] = [m.value * scale, error]
            about = {"label": line(label), "model": line(model), "method": None if method is None else line(method)}
            points.append({"at": places[model, label], **about, "values": values})
    floors = {line(model): noise_of(table.variants(model))[0] for model in table.models}
    return {
        "across": list(axes[True].items()),
        "upwards": list(axes[False].items()),
        "models": list(map(line, table.models)),
        "methods": list(map(line, table.methods)),
        "points": points,
        "noise": {model: floor for model, floor in floors.items() if floor > 0},
    }
