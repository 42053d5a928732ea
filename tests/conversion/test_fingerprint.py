"""What decides the bytes of an artifact: unfinished work is continued only where all of it is the same."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import CALIBRATION, SAMPLE, prepare_job

from quantkit.contracts.registry import find_format
from quantkit.conversion import manifest
from quantkit.conversion.check import check
from quantkit.conversion.manifest import fingerprint
from quantkit.formats.source import open_source
from quantkit.system.interpreter import PACKAGE, code_digest

CALIBRATED = {"calibration", "device", "batch_tokens", "threads", "processor"}


def checked(model, out, method="gptq", text=SAMPLE):
    return check(prepare_job(str(model), method, 4, calibration={**CALIBRATION, "text": str(text)}), out).job


@pytest.fixture(scope="module")
def job(tiny, tmp_path_factory):
    return checked(tiny, tmp_path_factory.mktemp("out") / "out")


def other_file(name):
    def change(job, place, _):
        copy = Path(shutil.copytree(job.source.folder, place / "tiny"))
        (copy / name).write_text((copy / name).read_text() + "\n")
        return replace(job, source=open_source(str(copy)))

    return change


def other_calibration(job, place, _):
    text = place / SAMPLE.name
    place.mkdir(exist_ok=True)
    text.write_text(SAMPLE.read_text()[5000:])
    return replace(job, calibration=checked(job.source.folder, place / "out", text=text).calibration)


def patched(place, name, value):
    def change(job, _, patch):
        patch.setattr(place, name, lambda *_: value)
        return job

    return change


CHANGES = {
    "recipe": ("recipe", lambda job, *_: replace(job, recipe=job.recipe.model_copy(update={"revision": "main"}))),
    "format": ("format", lambda job, *_: replace(job, format=find_format("awq"))),
    # an option that the recipe does not name, and whose default has changed
    "option": ("options", lambda job, *_: replace(job, options=job.options.model_copy(update={"sym": False}))),
    "resolved": ("options", lambda job, *_: replace(job, checked=replace(job.checked, options={"group_size": 16}))),
    "source": ("source", other_file("config.json")),
    "tokenizer": ("side_files", other_file("tokenizer.json")),
    "version": ("versions", patched(manifest, "package_versions", {"safetensors": "99.0"})),
    "code": ("code", patched(manifest, "code_digest", "another")),
    "calibration": ("calibration", other_calibration),
    "device": ("device", lambda job, *_: replace(job, device="cuda")),
    "batch_tokens": ("batch_tokens", lambda job, *_: replace(job, batch_tokens=2048)),
    "threads": ("threads", patched(torch, "get_num_threads", 99)),
    "processor": ("processor", patched(torch.backends.cpu, "get_cpu_capability", "ANOTHER")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_key_follows_what_it_names(name, job, tmp_path, monkeypatch):
    key, change = CHANGES[name]
    before = json.loads(json.dumps(fingerprint(job)))
    assert json.loads(json.dumps(fingerprint(job))) == before
    after = json.loads(json.dumps(fingerprint(change(job, tmp_path / "place", monkeypatch))))
    assert {one for one in before if before[one] != after[one]} == {key}


def test_every_key_is_above_and_what_calibrates_nothing_hangs_on_no_threads(job, tiny, tmp_path):
    keys = {key for key, _ in CHANGES.values()}
    assert set(fingerprint(job)) == keys
    assert set(fingerprint(checked(tiny, tmp_path / "out", "rtn"))) == keys - CALIBRATED


def test_the_digest_of_the_code_is_of_what_computes(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    package = Path(shutil.copytree(PACKAGE, tmp_path / "quantkit", ignore=ignored))
    before = code_digest(package)
    for name in ("formats/gguf/ggml/search.c", "numerics/grid.py", "__init__.py"):
        data = (package / name).read_bytes()
        (package / name).write_bytes(data + b"\n")
        assert code_digest(package) != before
        (package / name).write_bytes(data)
    for name in ("cli/app.py", "cli/newest.py", "data/sample_articles.txt"):
        (package / name).write_text("changed = 1\n")
    assert code_digest(package) == before
    (tmp_path / "cli").mkdir()  # a folder of this name above the package is another one
    package = package.rename(tmp_path / "cli" / "quantkit")
    assert code_digest(package) == before
    (package / "methods" / "newest.py").write_text("BITS = 1\n")
    assert code_digest(package) != before
