"""One small attack of each kind: one line that names it, within limits of memory and time, and nothing left behind."""

import filecmp
import json
import resource
import shutil
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from gguf_files import save_model
from killed import forked, started
from test_untrusted import BOMB
from tiny_models import quantkit

from bench.fuzz import __main__ as fuzz
from bench.fuzz import judges
from quantkit.conversion.verify import verify

MEMORY = 2 << 30
SECONDS = 60
DEEP = 100_000
RTN = ("convert", "model", "--out", "out", "--method", "rtn")
GGUF = ("convert", "model", "--out", "out", "--method", "gguf", "--bits", "Q8_0")
RUN = ("run", "recipe.yaml")
CONFIG, SAFETENSORS = "model/config.json", "model/model.safetensors"
# What must not stop a conversion, nor end up in it.
HARMLESS = {
    "a day that is none in the card": ("model/README.md", "---\nlicense: mit\ndate: 2024-02-30\n---\n"),
    "a card nested without end": ("model/README.md", "---\na: " + "[" * DEEP + "\n---\n"),
    "an unfinished work nested without end": ("out.partial/work.json", "[" * DEEP),
}
REPOSITORY = Path(__file__).parents[2]
# The kinds whose cases are quickest; `make bench-fuzz` runs all of them.
KINDS = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("model.safetensors", "shards", "index.json", "links", "quantkit.json", "artifact files", "rehashed files"),
    *("GGUF file", "importance file", "recipe", "command line", "output folder"),
)


def key(name, to):
    return lambda data: json.dumps({**json.loads(data), name: to}).encode()


# The file that is damaged, how, the command that meets it, and what the one line that answers has to name.
ATTACKS = {
    "JSON nested without end": (CONFIG, lambda _data: b'{"a":' * DEEP + b"1" + b"}" * DEEP, RTN, "config.json"),
    "a billion layers": (CONFIG, key("num_hidden_layers", 10**9), RTN, "num_hidden_layers"),
    "a context of 10^18": (CONFIG, key("max_position_embeddings", 10**18), GGUF, "max_position_embeddings"),
    "a header of 2^63 bytes": (SAFETENSORS, lambda data: struct.pack("<Q", 2**63) + data[8:], RTN, "model.safetensors"),
    "aliases that multiply": ("recipe.yaml", lambda data: data + BOMB.encode(), RUN, "recipe.yaml"),
    "a NUL in a path": ("recipe.yaml", lambda data: data + b'out: "a\\0b"\n', RUN, "out"),
    "nobody's home": (CONFIG, bytes, ("convert", "~nobody-at-all/x", "--method", "rtn"), "~nobody-at-all/x"),
    "a size of 400 nines": (CONFIG, bytes, (*GGUF, "--split-max-size", "9" * 400), "split_max_size"),
}


@pytest.fixture(scope="module")
def sound(once):
    def make(folder):
        sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 512}
        model = save_model(folder / "model", **sizes)
        assert quantkit("convert", model, "--method", "rtn", "--out", folder / "artifact").code == 0
        (folder / "recipe.yaml").write_text(yaml.safe_dump({"model": "model", "method": "rtn"}))

    return once("attacked", make)


@pytest.fixture
def inputs(sound, here):
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


@pytest.mark.slow
def test_three_hundred_damaged_inputs():
    command = [sys.executable, "-m", "bench.fuzz", "--seed", "20", "--cases", "300", "--kinds", ",".join(KINDS)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "| all | 300 |" in done.stdout, done.stdout


def say_no():
    judges.source = lambda *_: "somebody else refuses it"


def run_fuzzer(prepare, *arguments):
    """With these arguments after `prepare`; its table goes to standard error."""
    sys.argv, sys.stdout = ["bench.fuzz", *arguments], sys.stderr
    if prepare is not None:
        prepare()
    sys.exit(fuzz.main())


@pytest.mark.parametrize(("prepare", "found"), [(None, "done, right"), (say_no, "TAKEN")])
def test_its_judges_find_what_is_wrong_and_nothing_else(prepare, found, tmp_path):
    arguments = ("--seed", "20", "--case", "config.json:1", "-v", "--sound")
    told = forked(partial(run_fuzzer, prepare, *arguments), tmp_path / "log").wait(int(prepare is not None))
    assert f"{found} config.json:1" in told, told
