import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tiny_models import CALIBRATION

from quantkit.checkpoints.spool import JOURNAL, SPOOL, Spool
from quantkit.conversion.convert import convert
from quantkit.conversion.staging import WORK_FILES
from quantkit.system.files import replace_text, sync_folder


def state_of(path):
    """Which file or folder it is, and the bytes or the names in it."""
    inside = sorted(inner.name for inner in path.iterdir()) if path.is_dir() else path.read_bytes()
    return path.stat().st_ino, inside


class Calls:
    """Syncs as (path, state then), renames as (old, new), in order; `watch` is called before each sync."""

    def __init__(self, monkeypatch):
        self.all = []
        self.watch = lambda _path: None
        fsync, rename, replace = os.fsync, os.rename, os.replace

        def synced(number):
            path = Path(f"/proc/self/fd/{number}").readlink()
            self.watch(path)
            fsync(number)
            self.all.append(("sync", path, state_of(path)))

        def renamed(plain):
            def call(old, new, **given):
                plain(old, new, **given)
                self.all.append(("rename", Path(old).absolute(), Path(new).absolute()))

            return call

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "rename", renamed(rename))
        monkeypatch.setattr(os, "replace", renamed(replace))

    def place(self, kind, path, value=None):
        found = [i for i, call in enumerate(self.all) if call[:2] == (kind, path) and value in (None, call[2])]
        assert found, f"no {kind} of {path} as it is, among {[call[:2] for call in self.all]}"
        return found[-1]


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


@pytest.mark.parametrize(
    ("method", "options"),
    [("gptq", {}), ("nf4", {}), ("gguf", {"bits": "Q4_K_M", "rounding": "gptq"}), ("ctranslate2", {})],
)
def test_an_artifact_is_on_the_disk_before_it_has_its_name(method, options, one_block, tmp_path, calls):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    if method == "gptq":  # in place of another
        convert(str(one_block), "rtn", out=out)
        calls.all.clear()
    convert(str(one_block), method, out=out, calibration=CALIBRATION, force=method == "gptq", **options)
    named = calls.place("rename", partial, out)
    paths = [out, *out.rglob("*")]
    assert len(paths) > 5
    assert {path.name for path in paths}.isdisjoint(WORK_FILES)
    for path in paths:
        # As it is now: nothing of it was changed after it was synced.
        assert calls.place("sync", partial / path.relative_to(out), state_of(path)) < named, path
    assert calls.place("sync", tmp_path) > named
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_text_is_on_the_disk_before_it_replaces_another_and_its_name_after(tmp_path, calls):
    path, new = tmp_path / "a.json", tmp_path / "a.json.new"
    path.write_text("old")
    before = []
    replace_text(path, "the new one", lambda: before.append(len(calls.all)))
    assert [call[:2] for call in calls.all] == [("sync", new), ("rename", new), ("sync", tmp_path)]
    assert calls.all[0][2] == state_of(path)
    assert calls.all[2][2] == state_of(tmp_path)
    assert before == [1]
    assert path.read_text() == "the new one"


@pytest.mark.parametrize(("number", "told"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_that_syncs_no_folders_is_taken_and_an_error_is_not(number, told, tmp_path, calls):
    def fail(_path):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "a.json"
    path.write_text("old")
    calls.watch = fail
    with pytest.raises(OSError, match=os.strerror(number)) if told else nullcontext():
        sync_folder(tmp_path)
    with pytest.raises(OSError, match=os.strerror(number)):  # of a file every error counts
        replace_text(path, "new")
    assert path.read_text() == "old"


def test_a_block_is_on_the_disk_before_the_journal_says_so(tmp_path, calls):
    spool, journal = tmp_path / SPOOL, tmp_path / JOURNAL
    lines = []

    def watch(path):
        lines.append((path.name, len(journal.read_bytes().splitlines()) if journal.exists() else 0))

    calls.watch = watch
    writer = Spool(tmp_path)
    for block in range(2):
        writer.add(f"t{block}", torch.arange(100.0))
        writer.finish_block(block, {})
        # Nothing of either was written after it was synced.
        calls.place("sync", spool, state_of(spool))
        calls.place("sync", journal, state_of(journal))
    writer.close()
    # Both files are new with the first block: their names have to be there, too.
    assert lines == [(SPOOL, 0), (JOURNAL, 1), (tmp_path.name, 1), (SPOOL, 1), (JOURNAL, 2)]
    calls.place("sync", tmp_path, state_of(tmp_path))
