"""The command `quantkit push`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.options import JsonOption, save, say

if TYPE_CHECKING:
    from quantkit.publishing.push import Plan


def push(
    artifact: Annotated[Path, typer.Argument(help="Artifact folder.")],
    *,
    repo: Annotated[str, typer.Option(help="Repository on the Hugging Face Hub, as user/name.")],
    create: Annotated[bool, typer.Option("--create", help="Make the repository where there is none.")] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Make it a private one; one that is public is refused.")
    ] = False,
    base_model: Annotated[
        str | None, typer.Option(help="The source's name on the hub, where it was a folder, as user/name.")
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Report of eval-tasks (--json), for scores on registered benchmarks. Give it again for more.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would go; ask no network.")] = False,
    json: JsonOption = None,
) -> None:
    """Put an artifact on the Hugging Face Hub, with its card; the same command goes on after a failure."""
    import json as json_module

    from quantkit.cli.progress import shown
    from quantkit.publishing.push import plan as planned
    from quantkit.publishing.push import push as pushing

    if dry_run:
        with shown() as progress:
            plan = planned(artifact, repo, base_model=base_model, results=results or (), progress=progress)
        _show(plan)
        values = [{"name": one.name, "bytes": one.nbytes, "sha256": one.sha256} for one in plan.uploads]
        save(json, json_module.dumps({"repo": repo, "files": values, "notes": plan.notes}, indent=2))
        return
    with shown() as progress:
        pushed = pushing(
            artifact, repo, create=create, private=private, base_model=base_model, results=results or (),
            progress=progress,
        )  # fmt: skip
    save(json, json_module.dumps(asdict(pushed), indent=2))
    counts = f"{len(pushed.sent)} files sent, {len(pushed.kept)} were there"
    gone = f", {len(pushed.removed)} of a former artifact removed" if pushed.removed else ""
    say(f"{pushed.url}: {counts}{gone}; commit {pushed.commit[:12]}")
    for note in pushed.notes:
        say(f"  note: {note}")


def _show(plan: Plan) -> None:
    """Print what would go."""
    from quantkit.report.table import megabytes

    say(f"to {plan.repo} would go:")
    for upload in plan.uploads:
        say(f"  {upload.nbytes:>15,} bytes  {upload.name}")
    say(f"  {len(plan.uploads)} files, {megabytes(sum(upload.nbytes for upload in plan.uploads))}")
    for note in plan.notes:
        say(f"  note: {note}")
