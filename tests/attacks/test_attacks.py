"""One small attack of each kind: one line that names it, within limits of memory and time, and nothing left behind."""

import filecmp
import json
import resource
import shutil
import struct
from pathlib import Path

import pytest
import yaml
from gguf_files import save_model
from killed import started
from test_untrusted import BOMB
from tiny_models import quantkit

from quantkit.conversion.verify import verify

MEMORY = 2 << 30
SECONDS = 60
DEEP = 100_000


def key(name, to):
    """Another value of a JSON file."""
    return lambda data: json.dumps({**json.loads(data), name: to}).encode()


def long_header(data):
    return struct.pack("<Q", 2**63) + data[8:]


RTN = ("convert", "model", "--out", "out", "--method", "rtn")
GGUF = ("convert", "model", "--out", "out", "--method", "gguf", "--bits", "Q8_0")
RUN = ("run", "recipe.yaml")
CONFIG = "model/config.json"
# The file that is damaged, how, the command that meets it, and what the one line that answers has to name.
ATTACKS = {
    "JSON nested without end": (CONFIG, lambda _data: b'{"a":' * DEEP + b"1" + b"}" * DEEP, RTN, "config.json"),
    "a billion layers": (CONFIG, key("num_hidden_layers", 10**9), RTN, "num_hidden_layers"),
    "a context of 10^18": (CONFIG, key("max_position_embeddings", 10**18), GGUF, "max_position_embeddings"),
    "a header of 2^63 bytes": ("model/model.safetensors", long_header, RTN, "model.safetensors"),
    "aliases that multiply": ("recipe.yaml", lambda data: data + BOMB.encode(), RUN, "recipe.yaml"),
    "a NUL in a path": ("recipe.yaml", lambda data: data + b'out: "a\\0b"\n', RUN, "out"),
    "nobody's home": (CONFIG, bytes, ("convert", "~nobody-at-all/x", "--method", "rtn"), "~nobody-at-all/x"),
    "a size of 400 nines": (CONFIG, bytes, (*GGUF, "--split-max-size", "9" * 400), "split_max_size"),
}
# What must not stop a conversion, nor end up in it.
HARMLESS = {
    "a day that is none in the card": ("model/README.md", "---\nlicense: mit\ndate: 2024-02-30\n---\n"),
    "a card nested without end": ("model/README.md", "---\na: " + "[" * DEEP + "\n---\n"),
    "an unfinished work nested without end": ("out.partial/work.json", "[" * DEEP),
}


@pytest.fixture(scope="module")
def sound(once):
    """A model, an artifact and a recipe of it."""

    def make(folder):
        sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 512}
        model = save_model(folder / "model", **sizes)
        assert quantkit("convert", model, "--method", "rtn", "--out", folder / "artifact").code == 0
        (folder / "recipe.yaml").write_text(yaml.safe_dump({"model": "model", "method": "rtn"}))

    return once("attacked", make)


@pytest.fixture
def inputs(sound, here):
    """A folder with a copy of all that, where the command runs."""
    shutil.copytree(sound, here / "here")
    return here / "here"


def limit():
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_ends_in_one_line(name, inputs, tmp_path, monkeypatch):
    file, change, command, says = ATTACKS[name]
    (inputs / file).write_bytes(change((inputs / file).read_bytes()))
    monkeypatch.chdir(inputs)
    before = sorted(inputs.rglob("*"))
    err = started(list(command), tmp_path / "log", limit).wait(1).strip()
    assert err.startswith("error: "), err
    assert err.isprintable(), err
    assert len(err) <= 2000
    assert says in err, err
    assert sorted(inputs.rglob("*")) == before


@pytest.mark.parametrize("name", HARMLESS)
def test_conversion_does_not_stop_at_it(name, inputs, tmp_path, monkeypatch):
    file, text = HARMLESS[name]
    (inputs / file).parent.mkdir(exist_ok=True)
    (inputs / file).write_text(text)
    monkeypatch.chdir(inputs)
    started(list(RTN), tmp_path / "log", limit).wait(0)
    assert verify("out").added_files() == []
    assert not Path("out.partial").exists()
    names = [path.name for path in sorted((inputs / "artifact").iterdir()) if path.name != "README.md"]
    assert [name for name in names if not filecmp.cmp(f"artifact/{name}", f"out/{name}", shallow=False)] in (
        [],
        ["quantkit.json"],  # which holds the card's hash
    )
