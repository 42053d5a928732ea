"""One small attack of each kind: one line that names it, within limits of memory and time, and nothing left behind."""

import filecmp
import resource
from pathlib import Path

import pytest
import yaml
from attacks import ATTACKS, HARMLESS, Attack, place
from gguf_files import save_model
from killed import started
from tiny_models import SAMPLE, quantkit

from quantkit.conversion.verify import verify

MEMORY = 2 << 30
SECONDS = 60


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an artifact and a GGUF file of it, a recipe and a text."""
    folder = tmp_path_factory.mktemp("sound")
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 512}
    model = save_model(folder / "model", **sizes)
    assert quantkit("convert", model, "--method", "rtn", "--out", folder / "artifact").code == 0
    assert quantkit("convert", model, "--method", "gguf", "--bits", "F16", "--out", folder / "gguf").code == 0
    next((folder / "gguf").glob("*.gguf")).rename(folder / "model.gguf")
    calibration = ("--calibration-sequences", 2, "--calibration-length", 16, "--calibration-text", SAMPLE)
    assert quantkit("imatrix", model, "--out", folder / "importance.gguf", *calibration).code == 0
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"model": "model", "method": "rtn"}))
    (folder / "text.txt").write_text(SAMPLE.read_text()[:4000])
    return folder


def limit() -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack_ends_in_one_line(attack: Attack, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    place(attack, sound, here)
    monkeypatch.chdir(here)
    before = sorted(here.rglob("*"))
    child = started(list(attack.command), tmp_path / "log", limit)
    err = child.wait().strip()
    if child.code == 2:  # how typer tells a wrong value
        assert "Error" in err, err
        assert "Traceback" not in err, err
    else:
        assert child.code == 1, err
        assert err.startswith("error: "), err
        assert err.isprintable(), err
    assert len(err) <= 2000
    for part in attack.says:
        assert part in err, err
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("attack", HARMLESS, ids=lambda attack: attack.name)
def test_conversion_does_not_stop_at_it(
    attack: Attack, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    place(attack, sound, here)
    monkeypatch.chdir(here)
    child = started(list(attack.command), tmp_path / "log", limit)
    err = child.wait()
    assert child.code == 0, err
    assert verify("out").added_files() == []
    assert not Path("out.partial").exists()
    names = [path.name for path in sorted((here / "artifact").iterdir()) if path.name != "README.md"]
    assert [name for name in names if not filecmp.cmp(f"artifact/{name}", f"out/{name}", shallow=False)] in (
        [],
        ["quantkit.json"],  # which holds the card's hash
    )
