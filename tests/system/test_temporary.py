import ast
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from killed import forked

import quantkit
from quantkit.system.files import PREFIX, temporary_folder

PACKAGE = Path(quantkit.__file__).parent


def die(place):
    with temporary_folder(place) as folder:
        (folder / "large.bin").write_bytes(b"x" * 1000)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_folder_is_empty_and_goes(tmp_path, monkeypatch):
    with temporary_folder(tmp_path) as folder:
        assert list(folder.iterdir()) == []
        assert folder.is_relative_to(tmp_path)
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), temporary_folder(tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    # Without a place it lies where the system has such.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_folder() as folder:
        assert folder.is_relative_to(tmp_path)


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    place, log = tmp_path / "place", tmp_path / "log"
    place.mkdir()
    for _ in range(2):
        forked(partial(die, place), log).wait(-signal.SIGKILL)
        assert len(list(place.iterdir())) == 1
    with temporary_folder(place) as folder:
        assert list(place.iterdir()) == [folder]
    assert list(place.iterdir()) == []


def test_a_living_one_and_folders_of_others_are_left_alone(tmp_path):
    with temporary_folder(tmp_path) as one, temporary_folder(tmp_path) as other:
        (one / "a").touch()
        (other / "b").touch()
        with temporary_folder(tmp_path):
            assert (one / "a").exists()
        assert (other / "b").exists()
    assert list(tmp_path.iterdir()) == []
    dead = 1 << 22  # above the largest number of a process
    other_machine = f"quantkit-another-{dead}-abcd1234"
    kept = [tmp_path / name for name in ("quantkit-results", other_machine, f"{PREFIX}{dead}-thesis", "other")]
    for path in kept:
        path.mkdir()
        (path / "thesis.txt").write_text("years of work")
    link = tmp_path / f"{PREFIX}{dead}-abcd1235"
    link.symlink_to("other")
    left = tmp_path / f"{PREFIX}{dead}-abcd1236"
    left.mkdir()
    with temporary_folder(tmp_path):
        assert not left.exists()
    assert all((path / "thesis.txt").exists() for path in kept)
    assert link.is_symlink()


def test_every_temporary_folder_of_the_package_is_such_a_one():
    """One inside of such a folder goes with it."""
    allowed = {"system/files.py", "evaluation/process.py"}
    found = set()
    for path in PACKAGE.rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        if names & {"TemporaryDirectory", "mkdtemp", "mkstemp", "NamedTemporaryFile"}:
            found.add(path.relative_to(PACKAGE).as_posix())
    assert found <= allowed
