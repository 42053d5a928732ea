"""The table of all rows, and the targets that they miss."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.rows import TARGETS, Target

UNITS = {"kld": "KLD", "cpu_s": "CPU seconds", "peak_gb": "peak memory"}


def print_table(results: list[dict[str, Any]]) -> None:
    """Print one table of all results; failures say why."""
    table = Table(title="Converted by each tool, judged by quantkit (KLD and perplexity: less is better)")
    for column in ("model", "tool", "setting"):
        table.add_column(column)
    for column in ("CPU s", "wall s", "peak GB", "perplexity", "KLD ± se"):
        table.add_column(column, justify="right")
    for result in results:
        start = (result["model"], result["tool"], f"{result['setting']}, g{result['group_size']}")
        if "reason" in result:
            table.add_row(*start, "", "", "", "", f"does not run: {result['reason']}")
            continue
        table.add_row(
            *start,
            f"{result['cpu_s']:.0f}",
            f"{result['wall_s']:.0f}",
            f"{result['peak_gb']:.2f}",
            f"{result['perplexity']:.3f} ± {result['perplexity_se']:.3f}",
            f"{result['kld']:.5f} ± {result['kld_se']:.5f}",
        )
    Console(width=160).print(table)


def missed_targets(results: list[dict[str, Any]], rows: set[str]) -> list[str]:
    """One line for each target of `rows` that is missed or cannot be checked."""
    lines: list[str] = []
    for key in sorted({result["key"] for result in results}):
        of_model = [result for result in results if result["key"] == key]
        lines += [line for target in TARGETS if target.row in rows and (line := _missed(target, of_model, key))]
    return lines


def _missed(target: Target, results: list[dict[str, Any]], key: str) -> str | None:
    what = f"{target.row}, model {key}: {UNITS[target.measure]} at most {target.share} of the peers'"
    ours = next((result for result in results if result["row"] == target.row), None)
    peers = [r for r in results if r["kind"] == target.kind and r["tool"] != "quantkit" and "reason" not in r]
    if ours is None or "reason" in ours or not peers:
        return f"NOT CHECKED {what}: " + ("no peer has a result" if ours and not peers else "our row has no result")
    chosen = min(peers, key=lambda peer: float(peer["cpu_s" if target.fastest else target.measure]))
    share = ours[target.measure] / chosen[target.measure]
    if share <= target.share:
        return None
    figures = f"{ours[target.measure]:.5g} against {chosen[target.measure]:.5g} of {chosen['row']}"
    return f"MISSED {what}: {share:.3f} ({figures})"
