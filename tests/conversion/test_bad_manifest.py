"""A damaged quantkit.json ends as one line before anything is opened by it, and files are those of the folder."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import quantkit, save_tiny

from quantkit.artifact import CARD, MANIFEST, MOST_FILES, MOST_MANIFEST, open_artifact
from quantkit.conversion.convert import convert
from quantkit.errors import ArtifactError

ENTRY = {"bytes": 1, "sha256": "0" * 64}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    return convert(str(save_tiny(folder / "tiny")), "gguf", "Q8_0", folder / "made").folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / MANIFEST).read_text())
    change(values)
    (folder / MANIFEST).write_text(json.dumps(values))


def refused(folder: Path, says: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        open_artifact(folder)
    message = str(caught.value)
    assert says in message, message
    assert message.isprintable()
    assert len(message) < 2000


NASTY = [None, [], {}, "x", -1, True, [[]], 10**400, float("nan"), float("inf"), "x" * 100_000]
PLACES = [
    ("schema_version",), ("recipe",), ("recipe", "method"), ("recipe", "bits"), ("recipe", "options"),
    ("recipe", "calibration"), ("recipe", "seed"), ("format",), ("options",), ("source",), ("source", "model"),
    ("source", "parameters"), ("source", "config"), ("source", "hashes"), ("versions",), ("tensor_types",),
    ("weight_files",), ("weight_bytes",), ("bits_per_weight",), ("weight_error",), ("calibration_sha256",),
    ("calibration",), ("notes",), ("files",), ("files", "config.json"), ("files", "tokenizer.json"),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=".".join)
@pytest.mark.parametrize("value", NASTY, ids=lambda value: str(value)[:10])
def test_any_value_anywhere_is_opened_or_refused_in_one_line(place: tuple[str, ...], value: Any, copy: Path) -> None:
    def change(values: Any) -> None:
        for key in place[:-1]:
            values = values[key]
        values[place[-1]] = value

    edit(copy, change)
    ended = quantkit("verify", copy)
    if ended.code:
        assert ended.code == 1
        assert ended.err.startswith("error: ")
        assert ended.err.count("\n") == 1
        assert len(ended.err) < 2000


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("weight_bytes",), -1),
        (("weight_bytes",), 10**400),
        (("bits_per_weight",), float("nan")),
        (("bits_per_weight",), -1.0),
        (("source", "parameters"), 0),
        (("source", "parameters"), -5),
        (("tensor_types",), {"Q8_0": -1}),
        (("notes",), ["x" * 20_000]),
        (("notes",), ["x"] * 2_000),
        (("notes",), 5),
        (("files", "tokenizer.json"), {"bytes": -1, "sha256": "0" * 64}),
        (("files", "tokenizer.json"), {"bytes": 1, "sha256": "abc"}),
        (("files",), {f"{i}.json": ENTRY for i in range(MOST_FILES + 1)}),
    ],
)
def test_a_value_out_of_range_is_refused(place: tuple[str, ...], value: Any, copy: Path) -> None:
    def change(values: Any) -> None:
        for key in place[:-1]:
            values = values[key]
        values[place[-1]] = value

    edit(copy, change)
    refused(copy, place[-1])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe{}", "is not UTF-8 text"),
        (b"[1]", "holds no object"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"a":' * 90 + b"1" + b"}" * 90, "is nested deeper"),
        (b'{"notes": [' + b"1" * 10_000 + b"]}", "is not valid JSON"),
        (b" " * (MOST_MANIFEST + 1), "no such file has more than"),
    ],
    ids=["empty", "torn", "utf-16", "list", "deep", "nested", "digits", "large"],
)
def test_what_is_no_manifest_is_refused(content: bytes, says: str, copy: Path) -> None:
    (copy / MANIFEST).write_bytes(content)
    refused(copy, says)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "a/../b", "", ".", "..", "./a", "a//b", "a/", "a\0b", "a\\b", "a\nb"]
)
@pytest.mark.parametrize("key", ["files", "weight_files"])
def test_a_name_that_leads_elsewhere_is_refused(name: str, key: str, copy: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        if key == "files":
            values["files"][name] = ENTRY
        else:
            values["weight_files"].append(name)

    edit(copy, change)
    refused(copy, "outside its folder")


@pytest.mark.parametrize("name", ["tokenizer.json", MANIFEST])
@pytest.mark.parametrize("through_folder", [False, True])
def test_a_link_out_of_the_folder_is_refused_and_one_within_is_not(
    name: str, through_folder: bool, copy: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(copy / name, elsewhere / name)
    if through_folder and name != MANIFEST:
        (copy / "deep").symlink_to(elsewhere)
        edit(copy, lambda values: values["files"].update({f"deep/{name}": values["files"].pop(name)}))
    else:
        (copy / name).symlink_to(elsewhere / name)
    refused(copy, "is a link out of the artifact's folder")
    shutil.rmtree(elsewhere)


def test_a_link_within_the_folder_or_to_a_hub_cache_is_followed(made: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for path in made.iterdir():
        shutil.copyfile(path, blobs / path.name)
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / path.name, snapshot))
    open_artifact(snapshot).refuse_changed_files()


def test_a_link_that_is_planted_later_is_noticed_before_it_is_read(copy: Path, tmp_path: Path) -> None:
    artifact = open_artifact(copy)
    shutil.move(copy / "tokenizer.json", tmp_path / "moved")
    (copy / "tokenizer.json").symlink_to(tmp_path / "moved")
    with pytest.raises(ArtifactError, match="link out of the artifact"):
        artifact.refuse_changed_files()


def test_a_folder_in_the_place_of_a_file_is_told(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").mkdir()
    with pytest.raises(ArtifactError, match=r"lacks the file tokenizer\.json"):
        open_artifact(copy).refuse_changed_files()


@pytest.mark.parametrize("damage", ["link", "link within", "list", "deep", "other card", "outside", "no manifest"])
def test_a_damaged_manifest_beside_the_card_is_left_alone(damage: str, copy: Path, tmp_path: Path) -> None:
    before = (copy / MANIFEST).read_bytes()
    new, values = copy / f"{MANIFEST}.new", json.loads(before)
    if damage.startswith("link"):
        target = copy / "other.txt" if damage == "link within" else tmp_path / "other"
        target.write_bytes(before)
        new.symlink_to(target)
    elif damage in ("list", "deep"):
        new.write_text("[1]" if damage == "list" else "[" * 100_000)
    elif damage == "no manifest":
        new.write_text(json.dumps({"files": {CARD: values["files"][CARD]}}))
    else:
        if damage == "other card":
            values["files"][CARD]["sha256"] = "0" * 64
        else:
            values["files"]["../x"] = ENTRY
        new.write_text(json.dumps(values))
    assert open_artifact(copy).manifest.to_text().encode() == before
    assert (copy / MANIFEST).read_bytes() == before
    assert not (copy / MANIFEST).is_symlink()


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a\0b", "x" * 5000])
def test_a_path_that_cannot_be_one_is_told(path: str) -> None:
    with pytest.raises(ArtifactError, match="cannot be"):
        open_artifact(path)
