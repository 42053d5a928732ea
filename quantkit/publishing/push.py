"""push: an artifact becomes a repository on the Hugging Face Hub, whole or not at all.

Everything that can be refused is refused before the network is asked. All of it becomes one commit; what is there
already is not sent again, so the same command goes on after a failure, and does nothing when it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.artifact import Artifact
from quantkit.progress import Progress
from quantkit.publishing.hub import Pushed, send, token_of_user
from quantkit.publishing.plan import check, verified


def push(
    artifact: str | Path | Artifact,
    repo: str,
    *,
    private: bool = False,
    create: bool = False,
    base_model: str | None = None,
    results: Sequence[str | Path] = (),
    progress: Progress | None = None,
) -> Pushed:
    """Verify an artifact and put it into the repository `repo` (``user/name``) of the Hugging Face Hub, in one commit.

    `create` makes the repository where there is none; `private` makes it a private one, and refuses one that is public.
    `base_model` is the source's name on the hub, where it was a folder. `results` are reports of `quantkit eval-tasks`.
    The token is that of the environment (HF_TOKEN) or of `hf auth login`.
    What the repository holds already is not sent again. Files that the artifact there before had, and this one has not,
    are removed in the same commit.
    Raises RecipeError for a name that no repository has, ArtifactError for what is no whole artifact, ReportError for
    results that are not its own, HubError without a token, where the hub refuses or cannot be reached, and where the
    repository holds other files that engines would load.
    """
    asked = check(artifact, repo, base_model, results)
    token = token_of_user()
    return send(verified(asked, progress), token, create, private, progress or Progress())
