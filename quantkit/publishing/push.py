"""`quantkit push`: upload an artifact to a Hugging Face Hub repository, in one commit.

It uploads the verified files listed in the manifest, the model card, and scores of registered benchmarks. Large files
are uploaded first, one by one (by Xet, or by LFS without hf_xet), so a repeated push skips those that arrived; one
commit then adds all files. The token never appears in messages.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from quantkit.contracts.registry import server_of
from quantkit.conversion.verify import verify
from quantkit.errors import (
    LONGEST_REASON,
    ArtifactError,
    HubError,
    QuantkitError,
    RecipeError,
    ResourceError,
    one_line,
    reason_of,
    shortage_of,
)
from quantkit.publishing.results import PREFIX, eval_results
from quantkit.records.artifact import CARD, LOADABLE, MANIFEST, Artifact, FileEntry, open_artifact
from quantkit.report.card import BEGIN, convert_command, front_matter
from quantkit.system.files import temporary_folder
from quantkit.system.progress import Progress
from quantkit.system.untrusted import read_text, shown

MOST_CARD = 1 << 24  # bytes
# Endings of unfinished and temporary files, which are never pushed, even if a manifest names them.
UNFINISHED = (".partial", ".incomplete", ".lock", ".new", ".tmp")
HERE = "`FOLDER` is this folder."
NEXT = "\n## Recipe\n"  # commands are inserted before this section
UNMEASURED = f"{BEGIN}\nNothing yet."
LOGIN = "Log in with: hf auth login, or set HF_TOKEN to a token that may write (https://huggingface.co/settings/tokens)"
FIXES = {
    401: f"The token is invalid. {LOGIN}",
    403: "The token may not write to this repository. Use one that may.",
    404: "The repository does not exist, or the token may not see it. Create it with --create.",
    409: "Somebody else is changing it. Push again.",
}
GO_ON = "Run the same command to continue."


@dataclass(frozen=True)
class Upload:
    """A file to upload: its `name` in the repository, size in bytes, hex sha256, and its content or local path."""

    name: str
    nbytes: int
    sha256: str
    content: Path | bytes


@dataclass(frozen=True)
class PushPlan:
    """The files of a verified `artifact` to upload to `repo`, and notes for the user."""

    repo: str
    artifact: Artifact
    uploads: tuple[Upload, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Pushed:
    """The result of a push: the repository's URL and commit, and the names of files that were sent, unchanged (`kept`),
    or removed (they belonged only to the previous artifact).
    """

    url: str
    commit: str
    sent: tuple[str, ...]
    kept: tuple[str, ...]
    removed: tuple[str, ...]
    notes: tuple[str, ...]


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
    """Verify an artifact and upload it to the Hugging Face Hub repository `repo` (``user/name``), in one commit.

    `create`: create the repository if it is missing. `private`: create it as private, and refuse a public one.
    `base_model`: the source's name on the Hub, if it was a local folder. `results`: reports of `quantkit eval-tasks`.
    The token comes from the environment (HF_TOKEN) or `hf auth login`. Unchanged files are not uploaded again; files
    that only the previous artifact had are removed in the same commit.

    Raises RecipeError for an invalid name, ArtifactError for a damaged artifact, ReportError for another artifact's
    results, and HubError if there is no token, the Hub refuses or cannot be reached, or the repository holds other
    files that engines would load.
    """
    token = token_of_user()
    made = plan_push(artifact, repo, base_model=base_model, results=results, progress=progress)
    return send(made, token, create, private, progress or Progress())


def plan_push(
    artifact: str | Path | Artifact,
    repo: str,
    *,
    base_model: str | None = None,
    results: Sequence[str | Path] = (),
    progress: Progress | None = None,
) -> PushPlan:
    """Return what `push` would upload, without network or token. Raises the same errors as `push`."""
    for name, what in ((repo, "--repo"), (base_model, "--base-model")):
        if name is not None:
            _refuse_name(name, what)
    opened = artifact if isinstance(artifact, Artifact) else open_artifact(artifact)
    for name in opened.manifest.files:
        hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
        if hidden or name.lower().endswith(UNFINISHED) or name == MANIFEST:
            raise ArtifactError(
                f"{opened.folder / MANIFEST} names {shown(name)}, which is not a file of a model. "
                "Convert again with --force."
            )
    if CARD not in opened.manifest.files:
        raise ArtifactError(f"{opened.folder} has no {CARD}. Convert again with --force.")
    scores, notes = eval_results(results, opened)
    opened = verify(opened, progress)
    text, more = hub_card(opened, repo, base_model)
    card = _upload(CARD, text.encode())
    files = {**opened.manifest.files, CARD: FileEntry(bytes=card.nbytes, sha256=card.sha256)}
    manifest = opened.manifest.model_copy(update={"files": files})
    uploads = [
        Upload(name, entry.bytes, entry.sha256, opened.folder / name) for name, entry in files.items() if name != CARD
    ]
    uploads += [card, _upload(MANIFEST, manifest.to_text().encode()), *(_upload(*one) for one in scores.items())]
    return PushPlan(repo, opened, tuple(uploads), (*notes, *more))


def _refuse_name(repo: str, what: str) -> None:
    """Raise RecipeError unless the name is a valid Hub id ``user/name``."""
    with suppress(HFValidationError):
        validate_repo_id(repo)
        if "/" in repo:
            return
    raise RecipeError(
        f"{what} {shown(repo)} is not a name on the hub: give user/name, of letters, digits, '-', '_' and '.'"
    )


def _upload(name: str, data: bytes) -> Upload:
    return Upload(name, len(data), hashlib.sha256(data).hexdigest(), data)


def hub_card(artifact: Artifact, repo: str, base_model: str | None) -> tuple[str, list[str]]:
    """Return the artifact's model card for `repo`, and notes for the user.

    `base_model` is the source's Hub id; default: the manifest's, if the source came from the Hub. The card's commands
    download the folder from `repo`. Raises ArtifactError for a card without front matter.
    """
    text = read_text(artifact.folder / CARD, ArtifactError, most=MOST_CARD)
    head, metadata = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL), front_matter(text)
    if head is None or not metadata:
        raise ArtifactError(f"{artifact.folder / CARD} has no front matter. Convert again with --force.")
    notes = []
    recipe, source = artifact.manifest.recipe, artifact.manifest.source
    known = base_model or (source.model if source.revision is not None else None)
    if known is None:
        metadata = {k: v for k, v in metadata.items() if k not in ("base_model", "base_model_relation")}
        notes.append(
            f"the card names no base model: {source.model} was a folder. Give its name on the hub with --base-model"
        )
    else:
        metadata["base_model"] = known
        recipe = recipe.model_copy(update={"model": known})
    if UNMEASURED in text:
        notes.append("the card has no figures: add them with quantkit eval-ppl ARTIFACT --card")
    made = convert_command(recipe, "FOLDER")
    fetch = f"hf download {repo} --local-dir FOLDER"
    lines = [made] if made.isprintable() and "`" not in made else []
    lines += [fetch, "quantkit verify FOLDER", "quantkit eval-ppl FOLDER"]
    lines += ["quantkit serve FOLDER"] if server_of(artifact.manifest.format) else []
    words = "Convert, fetch, verify, evaluate and serve it with these commands:"
    section = "\n".join(["## Commands", "", words, "", "```bash", *lines, "```", ""])
    body = text[head.end() :].replace(HERE, f"`{fetch}` fetches it.", 1)
    body = body.replace(NEXT, f"\n{section}{NEXT}", 1) if NEXT in body else f"{body.rstrip()}\n\n{section}"
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n{body}", notes


def token_of_user() -> str:
    """Return the user's Hub token from the environment or login; raise HubError if there is none, or if offline."""
    if constants.HF_HUB_OFFLINE:
        raise HubError("nothing can be pushed while HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set. Unset it.")
    try:
        token = get_token()
    except Exception as error:  # noqa: BLE001, a login that has to be renewed
        raise HubError(f"no token for the Hugging Face Hub ({type(error).__name__}). {LOGIN}") from None
    if not token:
        raise HubError(f"no token for the Hugging Face Hub. {LOGIN}")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise HubError(f"the token for the Hugging Face Hub contains an invalid character, such as a blank. {LOGIN}")
    return token


def send(plan: PushPlan, token: str, create: bool, private: bool, progress: Progress) -> Pushed:
    """Upload the planned files and commit them; raise HubError."""
    api = HfApi(token=token, library_name="quantkit")
    with _hub_errors(f"{plan.repo} cannot be pushed to", token), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of libraries, and the hub's advice on a card
        if create:
            api.create_repo(plan.repo, private=private or None, exist_ok=True)
        info = api.repo_info(plan.repo)
        if private and not info.private:
            raise HubError(f"{plan.repo} is public, but --private needs a private one. Choose another --repo.")
        there = {entry.path: entry for entry in api.list_repo_tree(plan.repo, recursive=True) if hasattr(entry, "size")}
        sent = [upload for upload in plan.uploads if not _is_there(upload, there.get(upload.name))]
        names = [upload.name for upload in sent]
        removed = _outdated_files(api, plan, there) if MANIFEST in there and MANIFEST in names else []
        ours = {upload.name for upload in plan.uploads}
        loadable = {name for name in there if name.endswith(LOADABLE) and not name.startswith(".")}
        if strangers := sorted(loadable - ours - set(removed)):
            raise HubError(
                f"{plan.repo} has {shown(strangers[0])}, which is not in this artifact, and engines may load it. "
                "Choose another --repo, or remove it there."
            )
        commit = _commit(api, plan, sent, removed, info.sha, progress) if sent or removed else info.sha
    unchanged = tuple(upload.name for upload in plan.uploads if upload.name not in names)
    return Pushed(f"{api.endpoint}/{plan.repo}", str(commit), tuple(names), unchanged, tuple(removed), plan.notes)


def _commit(
    api: HfApi, plan: PushPlan, sent: list[Upload], removed: list[str], parent: str | None, progress: Progress
) -> str:
    """Upload large files one by one, then commit all changes; return the commit hash."""
    large = plan.artifact.manifest.weight_files
    operations = [_operation(upload, upload.name in large) for upload in sent]
    with progress.step(f"sending to {plan.repo}", sum(upload.nbytes for upload in sent) or 1) as advance:
        for upload, operation in zip(sent, operations, strict=True):
            if upload.name in large:
                advance(0, remark=upload.name)
                api.preupload_lfs_files(plan.repo, [operation], free_memory=False)
                advance(upload.nbytes)
        title = f"{plan.artifact.label} of {one_line(plan.artifact.manifest.source.name, 80)}"
        changes: list[CommitOperationAdd | CommitOperationDelete] = list(operations)
        changes += map(CommitOperationDelete, removed)
        # The hub refuses the commit if somebody else has committed meanwhile.
        commit = api.create_commit(plan.repo, changes, commit_message=title, parent_commit=parent).oid
        advance(sum(upload.nbytes for upload in sent if upload.name not in large))
    return commit


def _operation(upload: Upload, large: bool) -> CommitOperationAdd:
    """Return the commit operation that adds a file; it refuses content other than the verified bytes."""
    content = upload.content
    if isinstance(content, Path) and not large:
        content = content.read_bytes()
    operation = CommitOperationAdd(path_in_repo=upload.name, path_or_fileobj=content)
    if operation.upload_info.sha256.hex() != upload.sha256:  # if a large file changes later, the hub refuses it
        raise HubError(f"{shown(upload.name)} has changed since it was verified. Push again.")
    return operation


def _is_there(upload: Upload, entry: Any) -> bool:
    """Return whether the repository's file is identical, by sha256 or, for a small file, by git hash."""
    if entry is None or entry.size != upload.nbytes:
        return False
    if entry.lfs is not None:
        return bool(entry.lfs.sha256 == upload.sha256)
    data = upload.content if isinstance(upload.content, bytes) else upload.content.read_bytes()
    return bool(entry.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())


def _outdated_files(api: HfApi, plan: PushPlan, there: dict[str, Any]) -> list[str]:
    """Return files that only the previously pushed artifact had, and old scores if its bytes differ."""
    with temporary_folder() as folder:
        api.hf_hub_download(plan.repo, MANIFEST, local_dir=folder)
        try:
            former = open_artifact(folder)
        except ArtifactError:  # not pushed by quantkit, so nothing is removed
            return []
    scores = {name for name in there if name.startswith(PREFIX)} if former.digest != plan.artifact.digest else set()
    return sorted((there.keys() & (former.manifest.files.keys() | scores)) - {upload.name for upload in plan.uploads})


@contextmanager
def _hub_errors(what: str, token: str) -> Iterator[None]:
    """Turn library exceptions inside the context into HubError, ``WHAT: reason. FIX``; the token is removed."""
    try:
        yield
    except QuantkitError:
        raise
    except Exception as error:  # noqa: BLE001, any exception of a library
        if short := shortage_of(error):
            raise ResourceError(f"{what}: {short}") from None
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, HfHubHTTPError):
            cause = cause.__cause__
        status, reason = 0, reason_of(cause)
        if isinstance(cause, HfHubHTTPError):
            status = int(cause.response.status_code)
            words = one_line(cause.server_message or cause.response.reason_phrase, LONGEST_REASON).rstrip(". ")
            reason = f"the hub answers {status}, {words}"
        raise HubError(f"{what}: {reason}. {FIXES.get(status, GO_ON)}".replace(token, "...")) from None
