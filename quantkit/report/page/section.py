"""The section of a variant: how it is made and served, where it diverges, and what is to be known of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import yaml

from quantkit.artifact import Artifact
from quantkit.report.page.found import convert_command, shell_words, shown_folder
from quantkit.report.page.markup import Html, code, joined, listed, table, tag
from quantkit.report.page.view import View
from quantkit.report.records import NAMES, Measurement, Report
from quantkit.report.table import megabytes

WORST = 5  # windows
BINS = 16
WIDTH, HEIGHT = 320, 70  # of a histogram
OTHERS = ("delta_p", "delta_p_rms", "nll_correlation", "ln_perplexity_ratio")


def section(view: View, model: str, report: Report) -> Html:
    """All that is known of one variant, folded under its name and main figures."""
    label = report.model.label
    inside = tag("div", *_parts(view, report), id=view.places[model, label], class_="inside")
    name = label if len(view.sheet.models) == 1 else f"{model}, {label}"
    return tag("details", tag("summary", tag("b", name), " ", tag("span", _main(report))), inside)


def _main(report: Report) -> str:
    size, kld, perplexity = (report.find(name) for name in ("weight_bytes", "kld", "perplexity"))
    shown = [megabytes(size.value)] if size else []
    shown += [f"KLD {kld.value:.4f}"] if kld else []
    shown += [f"perplexity {perplexity.value:.2f}"] if perplexity else []
    return ", ".join(shown)


def _parts(view: View, report: Report) -> Iterator[Html]:
    artifact = view.artifacts.get(report.model.digest)
    if artifact is not None:
        yield from _made(view, artifact)
    elif report.model.method is not None:
        yield tag("p", "Its manifest does not lie beside its report, so its recipe is not known here.")
    if (kld := report.find("kld")) is not None:
        yield from _divergence(report, kld)
    engine = report.engine
    where = f"{engine.name} {engine.version}, computing in {engine.dtype} on {engine.device}"
    yield tag("p", f"Judged by {where}. sha256 of what was judged: {report.model.digest[:16]}.")
    notes = dict.fromkeys((*report.notes, *engine.notes, *report.model.notes))
    yield joined([tag("h4", "Notes and fallbacks"), listed(notes)] if notes else [])


def _made(view: View, artifact: Artifact) -> Iterator[Html]:
    m = artifact.manifest
    folder = shown_folder(artifact.folder)
    yield joined([tag("h4", "Make it"), code(convert_command(m.recipe, artifact.folder.name))])
    if server := view.server(m.format):
        yield joined([tag("h4", f"Serve it, by {server}"), code(shell_words("serve", folder))])
    else:
        yield tag("p", f"No server that quantkit starts takes the format {m.format}.")
    recipe = yaml.safe_dump(m.recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=False, width=100)
    yield joined([tag("h4", "Recipe"), code(recipe)])
    yield table(_stored(artifact), "pairs")


def _stored(artifact: Artifact) -> Iterator[tuple[str, str]]:
    m = artifact.manifest
    yield "format", m.format
    yield "tensors", ", ".join(f"{count} {kind}" for kind, count in m.tensor_types.items())
    if (error := m.weight_error) is not None:
        yield "weight error", f"mean {error.mean:.4f}, worst {error.worst:.4f} ({error.worst_tensor})"
    yield "made with", ", ".join(f"{name} {number}" for name, number in list(m.versions.items())[:3])


def _divergence(report: Report, kld: Measurement) -> Iterator[Html]:
    spread = [(f"KLD, {name}", f"{value:.5f}") for name, value in kld.details.items() if isinstance(value, float)]
    others = [m for name in OTHERS if (m := report.find(name)) is not None]
    yield tag("h4", "Divergence from the source")
    yield table([*spread, *((NAMES[m.name], _with_error(m)) for m in others)], "pairs")
    windows = _windows(report, kld)
    if windows is None:
        return
    title, values = windows
    yield tag("figure", histogram(values), tag("figcaption", f"{title}, {len(values)} windows"))
    worst = sorted(range(len(values)), key=lambda i: -values[i])[:WORST]
    named = (f"{_window(report, i)}: {values[i]:.4f}" for i in worst)
    yield tag("p", f"Worst windows: {'; '.join(named)}.")


def _with_error(m: Measurement) -> str:
    return f"{m.value:.5f}" + ("" if m.stderr is None else f" ± {m.stderr:.5f}")


def _windows(report: Report, kld: Measurement) -> tuple[str, list[float]] | None:
    """What the windows' figures are, and the figures; None where they were not kept."""
    count, w = len(kld.sums), report.windows
    if not count:
        return None
    if w.documents is None and count == w.windows and kld.n and kld.n % count == 0:
        return "mean KLD of a window", [total * count / kld.n for total in kld.sums]
    return "KLD summed over a window or page", list(kld.sums)


def _window(report: Report, i: int) -> str:
    w = report.windows
    if w.documents is not None:
        return f"{i + 1}"
    return f"{i + 1} (tokens {i * w.n_ctx:,} to {(i + 1) * w.n_ctx - 1:,})"


def histogram(values: list[float]) -> Html:
    """(W,) values as bars of equal width from 0 or the least to the most."""
    low, high = min(0.0, *values), max(values)
    counts = [0] * BINS
    for value in values:
        counts[bin_of(value, low, high)] += 1
    wide, most = WIDTH / BINS, max(counts)
    bars = "".join(
        f"M{i * wide + 1:g} {HEIGHT}v-{count / most * (HEIGHT - 4):.3g}h{wide - 2:g}V{HEIGHT}z"
        for i, count in enumerate(counts)
        if count
    )
    ordered = sorted(values)
    label = f"from {ordered[0]:.4f} to {high:.4f}, median {ordered[len(values) // 2]:.4f}"
    return tag(
        "svg",
        tag("path", d=bars, class_="bars"),
        tag("path", d=f"M0 {HEIGHT}.5H{WIDTH}", class_="axis"),
        tag("text", f"{low:.3g}", x=0, y=HEIGHT + 14),
        tag("text", f"{high:.3g}", x=WIDTH, y=HEIGHT + 14, class_="end"),
        viewBox=f"0 0 {WIDTH} {HEIGHT + 18}",
        class_="histogram",
        role="img",
        aria_label=label,
    )


def bin_of(value: float, low: float, high: float) -> int:
    """Which of the bars from `low` to `high` a value belongs to."""
    width = high - low
    if not 0 < width < math.inf:
        return 0
    return min(BINS - 1, math.floor((value - low) / width * BINS))
