"""The command `quantkit push`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option

from quantkit.cli import options
from quantkit.cli.options import save, say, say_notes
from quantkit.cli.progress import progress_bars
from quantkit.system.sizes import megabytes


def push(
    artifact: options.ArtifactFolder,
    *,
    repo: Annotated[str, Option(help="Repository on the Hugging Face Hub, as user/name.")],
    create: Annotated[bool, Option("--create", help="Create the repository if it is missing.")] = False,
    private: Annotated[bool, Option("--private", help="Create it private; refuse a public one.")] = False,
    base_model: Annotated[str | None, Option(help="user/name of the source on the hub, if it was a folder.")] = None,
    results: Annotated[
        list[Path] | None,
        Option(metavar="FILE", help="Report of eval-tasks (--json) with scores on registered benchmarks; repeatable."),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="List what would be sent, without network access.")] = False,
    json: options.Json = None,
) -> None:
    """Push an artifact with its card to the Hugging Face Hub; repeat the command to continue after a failure."""
    from quantkit.publishing.push import plan_push, push

    if dry_run:
        with progress_bars() as progress:
            planned = plan_push(artifact, repo, base_model=base_model, results=results or (), progress=progress)
        files = [{"name": one.name, "bytes": one.nbytes, "sha256": one.sha256} for one in planned.uploads]
        save(json, {"repo": repo, "files": files, "notes": planned.notes})
        say(f"to {repo} would go:")
        for upload in planned.uploads:
            say(f"  {upload.nbytes:>15,} bytes  {upload.name}")
        say(f"  {len(files)} files, {megabytes(sum(upload.nbytes for upload in planned.uploads))}")
        say_notes(planned.notes)
        return
    with progress_bars() as progress:
        pushed = push(
            artifact, repo, create=create, private=private, base_model=base_model, results=results or (),
            progress=progress,
        )  # fmt: skip
    save(json, asdict(pushed))
    counts = f"{len(pushed.sent)} files sent, {len(pushed.kept)} unchanged"
    gone = f", {len(pushed.removed)} of the previous artifact removed" if pushed.removed else ""
    say(f"{pushed.url}: {counts}{gone}; commit {pushed.commit[:12]}")
    say_notes(pushed.notes)
