"""A damaged quantkit.json ends as one line before anything is opened by it, and files are those of the folder."""

import json
import os
import shutil
from pathlib import Path

import pytest
from edits import edit_json, put

from quantkit.conversion.verify import verify
from quantkit.errors import ArtifactError
from quantkit.records.artifact import CARD, MANIFEST, MOST_FILES, MOST_MANIFEST, open_artifact

ENTRY = {"bytes": 1, "sha256": "0" * 64}


@pytest.fixture
def copy(gguf, tmp_path):
    return Path(shutil.copytree(gguf.folder, tmp_path / "copy"))


def refused(folder, says):
    with pytest.raises(ArtifactError) as caught:
        open_artifact(folder)
    message = str(caught.value)
    assert says in message, message
    assert message.isprintable()
    assert len(message) < 2000


NASTY = [None, {}, "x", -1, [[]], 10**400, float("nan"), "x" * 100_000]
PLACES = [
    ("recipe",), ("recipe", "method"), ("recipe", "bits"), ("recipe", "options"), ("recipe", "calibration"),
    ("format",), ("options",), ("source",), ("source", "parameters"), ("source", "config"), ("source", "hashes"),
    ("versions",), ("tensor_types",), ("weight_files",), ("weight_error",), ("calibration",), ("files",),
    ("files", "tokenizer.json"),
]  # fmt: skip


@pytest.mark.parametrize("value", NASTY, ids=lambda value: str(value)[:10])
def test_any_value_anywhere_is_opened_or_refused_in_one_line(value, copy):
    before = (copy / MANIFEST).read_text()
    for place in PLACES:
        edit_json(copy / MANIFEST, put(*place, value=value))
        told = ""
        try:
            verify(copy)
        except ArtifactError as error:
            told = str(error)
        assert told.isprintable(), place
        assert len(told) < 2000, place
        (copy / MANIFEST).write_text(before)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("schema_version",), 2),
        (("surprise",), 1),
        (("weight_bytes",), 10**400),
        (("source", "parameters"), 0),
        (("notes",), ["x" * 20_000]),
        (("files", "tokenizer.json"), {"bytes": 1, "sha256": "abc"}),
        (("files",), {f"{i}.json": ENTRY for i in range(MOST_FILES + 1)}),
    ],
)
def test_a_value_out_of_range_is_refused(place, value, copy):
    edit_json(copy / MANIFEST, put(*place, value=value))
    refused(copy, place[-1])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe{}", "is not UTF-8 text"),
        (b'{"a":' * 90 + b"1" + b"}" * 90, "is nested deeper"),
        (b" " * (MOST_MANIFEST + 1), "such files have at most"),
    ],
    ids=["torn", "utf-16", "nested", "large"],
)
def test_what_is_no_manifest_is_refused(content, says, copy):
    (copy / MANIFEST).write_bytes(content)
    refused(copy, says)


@pytest.mark.parametrize("key", ["files", "weight_files"])
def test_a_name_that_leads_elsewhere_is_refused(key, copy):
    before = json.loads((copy / MANIFEST).read_text())
    for name in ("/etc/passwd", "../x", "a/../b", "", "./a", "a//b", "a\0b", "a\\b", "a\nb"):
        added = {**before[key], name: ENTRY} if key == "files" else [*before[key], name]
        (copy / MANIFEST).write_text(json.dumps({**before, key: added}))
        refused(copy, "outside its folder")


@pytest.mark.parametrize(
    ("name", "through_folder"), [("tokenizer.json", False), ("tokenizer.json", True), (MANIFEST, False)]
)
def test_a_link_out_of_the_folder_is_refused(name, through_folder, copy, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(copy / name, elsewhere / name)
    if through_folder:
        (copy / "deep").symlink_to(elsewhere)
        edit_json(copy / MANIFEST, lambda values: values["files"].update({f"deep/{name}": values["files"].pop(name)}))
    else:
        (copy / name).symlink_to(elsewhere / name)
    refused(copy, "is a link out of the artifact's folder")


def test_a_link_to_a_hub_cache_is_followed(gguf, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for path in gguf.folder.iterdir():
        shutil.copyfile(path, blobs / path.name)
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / path.name, snapshot))
    open_artifact(snapshot).refuse_changed_files()


def test_what_replaces_a_file_after_opening_is_noticed_before_it_is_read(copy, tmp_path):
    artifact = open_artifact(copy)
    shutil.move(copy / "tokenizer.json", tmp_path / "moved")
    (copy / "tokenizer.json").symlink_to(tmp_path / "moved")
    with pytest.raises(ArtifactError, match="link out of the artifact"):
        artifact.refuse_changed_files()
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").mkdir()
    with pytest.raises(ArtifactError, match=r"lacks the file tokenizer\.json"):
        artifact.refuse_changed_files()


@pytest.mark.parametrize("damage", ["link", "deep", "other card"])
def test_a_damaged_manifest_beside_the_card_is_left_alone(damage, copy, tmp_path):
    before = (copy / MANIFEST).read_bytes()
    new, values = copy / f"{MANIFEST}.new", json.loads(before)
    values["files"][CARD] = ENTRY
    new.write_text("[" * 100_000 if damage == "deep" else json.dumps(values))
    if damage == "link":
        new.rename(tmp_path / "other").write_bytes(before)
        new.symlink_to(tmp_path / "other")
    assert open_artifact(copy).manifest.to_text().encode() == before
    assert (copy / MANIFEST).read_bytes() == before
    assert not (copy / MANIFEST).is_symlink()


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a\0b"])
def test_a_path_that_cannot_be_one_is_told(path):
    with pytest.raises(ArtifactError, match="cannot be"):
        open_artifact(path)
