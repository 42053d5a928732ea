"""The network's side of a push, through huggingface_hub.

Large files go one after the other before the commit (by Xet, or by LFS without hf_xet), so those that arrived are not
sent again after a failure; then one commit names them all, and the repository never holds half an artifact. The token
is in no message: what libraries say is told in our words, and without it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.artifact import LOADABLE, MANIFEST, open_artifact
from quantkit.errors import (
    LONGEST_REASON,
    ArtifactError,
    HubError,
    QuantkitError,
    ResourceError,
    one_line,
    reason_of,
    shortage_of,
)
from quantkit.progress import Progress
from quantkit.publishing.plan import Plan, Upload
from quantkit.publishing.results import PREFIX
from quantkit.system.temporary import temporary_folder
from quantkit.untrusted import shown

LOGIN = "Log in with: hf auth login, or set HF_TOKEN to a token that may write (https://huggingface.co/settings/tokens)"
FIXES = {
    401: f"The token is not taken. {LOGIN}",
    403: "The token may not do that there: give one that may write to this repository.",
    404: "The repository is not there, or the token may not see it. --create makes it.",
    409: "Somebody else changes it at this moment. Push again.",
}
GO_ON = "The same command goes on where it was."


@dataclass(frozen=True)
class Pushed:
    """What became of a push: the repository's address, its commit, and the names of the files that were sent, that were
    there already, and that a former artifact had left there.
    """

    url: str
    commit: str
    sent: tuple[str, ...]
    kept: tuple[str, ...]
    removed: tuple[str, ...]
    notes: tuple[str, ...]


def token_of_user() -> str:
    """The user's token, from the environment or the login; raises HubError where there is none, or no network."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise HubError("nothing can be pushed while HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set. Unset it.")
    try:
        token = get_token()
    except Exception as error:  # noqa: BLE001, a login that has to be renewed
        raise HubError(f"no token for the Hugging Face Hub ({type(error).__name__}). {LOGIN}") from None
    if not token:
        raise HubError(f"no token for the Hugging Face Hub. {LOGIN}")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise HubError(f"the token for the Hugging Face Hub holds what no token does, such as a blank. {LOGIN}")
    return token


def send(plan: Plan, token: str, create: bool, private: bool, progress: Progress) -> Pushed:
    """Carry out a plan; raises HubError."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(token=token, library_name="quantkit")
    with told(f"{plan.repo} cannot be pushed to", token), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries say of each other, and the hub's advice on a card
        if create:
            api.create_repo(plan.repo, private=private or None, exist_ok=True)
        info = api.repo_info(plan.repo)
        if private and not info.private:
            raise HubError(f"{plan.repo} is public, and --private asks for a private one. Choose another --repo.")
        there = {entry.path: entry for entry in api.list_repo_tree(plan.repo, recursive=True) if hasattr(entry, "size")}
        sent = [upload for upload in plan.uploads if not _is_there(upload, there.get(upload.name))]
        removed = _left_over(api, plan, there, sent)
        _refuse_mixture(plan, there, removed)
        large = plan.artifact.manifest.weight_files
        operations = {upload.name: _operation(CommitOperationAdd, upload, upload.name in large) for upload in sent}
        commit = info.sha
        if sent or removed:
            weights = [upload for upload in sent if upload.name in large]
            with progress.step(f"sending to {plan.repo}", sum(upload.nbytes for upload in sent) or 1) as advance:
                for upload in weights:
                    advance(0, remark=upload.name)
                    api.preupload_lfs_files(plan.repo, [operations[upload.name]], free_memory=False)
                    advance(upload.nbytes)
                deletions = [CommitOperationDelete(name) for name in removed]
                title = f"{plan.artifact.label} of {one_line(plan.artifact.manifest.source.name, 80)}"
                changes = [*operations.values(), *deletions]
                commit = api.create_commit(plan.repo, changes, commit_message=title, parent_commit=info.sha).oid
                advance(sum(upload.nbytes for upload in sent if upload not in weights))
    names = tuple(upload.name for upload in sent)
    kept = tuple(upload.name for upload in plan.uploads if upload.name not in names)
    return Pushed(f"{api.endpoint}/{plan.repo}", str(commit), names, kept, tuple(removed), plan.notes)


def _operation(kind: Any, upload: Upload, large: bool) -> Any:
    """The addition of a file to a commit: of the bytes that were verified, whatever lies there now."""
    content = upload.content
    if isinstance(content, Path) and not large:
        content = content.read_bytes()
        if hashlib.sha256(content).hexdigest() != upload.sha256:
            raise HubError(f"{shown(upload.name)} has changed since it was verified. Push again.")
    operation = kind(path_in_repo=upload.name, path_or_fileobj=content)
    operation.upload_info.sha256 = bytes.fromhex(upload.sha256)  # a large file's: other bytes are refused there
    return operation


def _is_there(upload: Upload, entry: Any) -> bool:
    """Whether the repository's file has these bytes, by its sha256, or git's hash of a small one."""
    if entry is None or entry.size != upload.nbytes:
        return False
    if entry.lfs is not None:
        return bool(entry.lfs.sha256 == upload.sha256)
    data = upload.content if isinstance(upload.content, bytes) else upload.content.read_bytes()
    return bool(entry.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())


def _left_over(api: Any, plan: Plan, there: dict[str, Any], sent: list[Upload]) -> list[str]:
    """What an artifact that was pushed there before has and this one has not; its scores where its bytes are others."""
    if MANIFEST not in there or MANIFEST not in {upload.name for upload in sent}:
        return []
    with temporary_folder() as folder:
        api.hf_hub_download(plan.repo, MANIFEST, local_dir=folder)
        try:
            former = open_artifact(folder)
        except ArtifactError:  # somebody else's: nothing there is ours to remove
            return []
    ours = {upload.name for upload in plan.uploads}
    scores = {name for name in there if name.startswith(PREFIX)} if former.digest != plan.artifact.digest else set()
    return sorted((there.keys() & (former.manifest.files.keys() | scores)) - ours)


def _refuse_mixture(plan: Plan, there: dict[str, Any], removed: list[str]) -> None:
    ours = {upload.name for upload in plan.uploads}
    others = [name for name in there if name.endswith(LOADABLE) and not name.startswith(".")]
    if strangers := sorted(set(others) - ours - set(removed)):
        raise HubError(
            f"{plan.repo} holds {shown(strangers[0])}, which is not of this artifact, and engines may load it. "
            "Choose another --repo, or remove it there."
        )


@contextmanager
def told(what: str, token: str) -> Iterator[None]:
    """Raise HubError, ``WHAT: reason. FIX``, for whatever a library raises inside; the token is in no part of it."""
    try:
        yield
    except QuantkitError:
        raise
    except Exception as error:  # noqa: BLE001, whatever a library raises
        if short := shortage_of(error):
            raise ResourceError(f"{what}: {short}") from None
        status, reason = _said(error)
        fix = FIXES.get(status or 0, GO_ON)
        raise HubError(f"{what}: {reason}. {fix}".replace(token, "...")) from None


def _said(error: BaseException) -> tuple[int | None, str]:
    """The status of the hub's answer where it gave one, and what it said; of wrapped errors the innermost."""
    from huggingface_hub.errors import HfHubHTTPError

    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    if not isinstance(error, HfHubHTTPError):
        return None, reason_of(error)
    status = int(error.response.status_code)
    words = one_line(error.server_message or error.response.reason_phrase, LONGEST_REASON).rstrip(". ")
    return status, f"the hub answers {status}, {words}"
