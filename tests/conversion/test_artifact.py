"""An artifact is there as a whole or not at all, says what it is, and notices every changed byte."""

import hashlib
import re
import shutil
import signal
from pathlib import Path

import pytest
from filelock import FileLock
from killed import Ends, started, when_stopped
from safetensors.torch import load_file
from tiny_models import CALIBRATION, conversion_by

from quantkit import convert, open_artifact, verify
from quantkit.checkpoints.spool import Spool
from quantkit.conversion import staging
from quantkit.conversion.staging import staged
from quantkit.errors import ArtifactError, OutputError
from quantkit.records.artifact import MANIFEST


@pytest.fixture
def made(artifact_of):
    return artifact_of("rtn").folder


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ArtifactError])
def test_an_interrupted_replacement_keeps_the_old_artifact(error, tiny, copy, monkeypatch):
    def fail(*_):
        raise error

    before = (copy / MANIFEST).read_bytes()
    for place, begun in (("methods.rtn.round_layer", False), ("conversion.convert.check_values", True)):
        with monkeypatch.context() as patch:
            patch.setattr(f"quantkit.{place}", fail)
            with pytest.raises(error):
                convert(str(tiny), "rtn", 8, copy, force=True)
        assert (copy / MANIFEST).read_bytes() == before
        # An interrupted process can go on; what went wrong is not kept.
        assert copy.with_name("copy.partial").exists() == (begun and error is KeyboardInterrupt)
    verify(copy)


def test_what_a_killed_process_left_is_cleared_and_a_living_one_is_respected(tiny, tmp_path):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    stops = Ends(Spool, "finish_block", number=signal.SIGSTOP)
    child = when_stopped(started(conversion_by("gptq", tiny, out), tmp_path / "log", stops))
    try:
        with pytest.raises(OutputError, match=rf"out\.partial is being written by process {child.process.pid}"):
            convert(str(tiny), "rtn", out=out)
        assert (partial / "tensors.spool").exists()
    finally:
        child.process.kill()
        child.wait()
    assert partial.exists()
    convert(str(tiny), "rtn", out=out)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "log"}


def test_a_lock_that_another_process_takes_in_the_last_moment_is_not_in_the_artifact(tmp_path, monkeypatch):
    """It comes when the first one has given its lock's file up, before the folder has its new name."""
    real, tried = staging.sync_folder, []

    def sync(folder):
        if (partial := tmp_path / "out.partial").is_dir():
            FileLock(partial / staging.OWNER).acquire(timeout=0)
            tried.append(folder)
        real(folder)

    monkeypatch.setattr(staging, "sync_folder", sync)
    with staged(tmp_path / "out", force=False) as folder:
        (folder / "model.safetensors").write_text("new")
    assert tried
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_lock_whose_folder_was_renamed_is_taken_anew(tmp_path, monkeypatch):
    """The first process publishes between another one's lock and what that writes into it."""
    real, moved = FileLock.acquire, []

    def acquire(self, *given, **named):
        held = real(self, *given, **named)
        if not moved:
            moved.append((tmp_path / "out.partial").rename(tmp_path / "out"))
        return held

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with pytest.raises(OutputError, match="exists"), staged(tmp_path / "out", force=False):
        raise AssertionError("the work was begun")
    assert moved
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_manifest_says_what_was_made_from_what(made, tiny):
    manifest = open_artifact(made).manifest
    contents = {path.name: path.read_bytes() for path in made.iterdir() if path.name != MANIFEST}
    assert {name: (entry.bytes, entry.sha256) for name, entry in manifest.files.items()} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()
    }
    assert set(contents) >= {"model.safetensors", "config.json", "tokenizer.json"}
    parameters = sum(value.numel() for value in load_file(tiny / "model.safetensors").values())
    assert (manifest.source.architecture, manifest.source.parameters) == ("llama", parameters)
    for name in ("config.json", "model.safetensors"):
        assert manifest.source.hashes[name] == hashlib.sha256((tiny / name).read_bytes()).hexdigest()
    size = len(contents["model.safetensors"])
    assert (manifest.weight_files, manifest.weight_bytes) == (("model.safetensors",), size)
    assert manifest.bits_per_weight == round(size * 8 / parameters, 4)
    assert manifest.tensor_types == {"float16": 8, "int4": 21}
    by_layer = dict.fromkeys(("target_bpw", "target_kld", "target_bits", "layer_bits"))
    more = {"kv_scales": False, "scale_search": False}
    assert manifest.options == {"group_size": 128, "sym": True, "head_bits": None, **more, **by_layer}
    assert (manifest.recipe.method, manifest.recipe.bits) == ("rtn", "4")
    assert {"quantkit", "torch", "safetensors"} <= set(manifest.versions)
    assert 0 < manifest.weight_error.mean < manifest.weight_error.worst < 0.2


@pytest.mark.parametrize("method", ["gptq", "gguf", "ctranslate2"])
def test_the_same_recipe_gives_the_same_bytes_at_any_place_and_time(method, tiny, tmp_path, monkeypatch):
    texts = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        shutil.copytree(tiny, "tiny")
        shutil.copyfile(str(CALIBRATION["text"]), "text.txt")
        convert("tiny", method, out=f"out-{place}", calibration={**CALIBRATION, "text": "text.txt"})
        files = {path.name: path.read_bytes() for path in Path(f"out-{place}").iterdir()}
        for name, data in files.items():
            assert str(tmp_path).encode() not in data, name
        texts.append(files)
    assert texts[0] == texts[1]
    assert not re.search(rb"\d\d:\d\d|20\d\d-\d\d", texts[0][MANIFEST])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", lambda data: data[:-9] + bytes([data[-9] ^ 16]) + data[-8:]),
        ("config.json", lambda data: data + b"\0"),
        ("quantize_config.json", None),
    ],
)
def test_every_change_of_a_file_is_noticed(name, change, copy):
    data = (copy / name).read_bytes()
    (copy / name).unlink()
    if change is not None:
        (copy / name).write_bytes(change(data))
    with pytest.raises(ArtifactError, match=name):
        verify(copy)
