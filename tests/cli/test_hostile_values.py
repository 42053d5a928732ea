import os
from pathlib import Path

import pytest
from test_untrusted import BOMB
from tiny_models import CALIBRATION, SAMPLE, quantkit

from quantkit import compare, convert, evaluate
from quantkit.errors import QuantkitError, RecipeError
from quantkit.records.recipe import load_recipe
from quantkit.system.sizes import parse_size

NINES = "9" * 400
pytestmark = pytest.mark.usefixtures("here")


def told(*arguments, says=""):
    """Run a command that must end with one line (1) or as misused (2), say it shortly, and leave nothing."""
    before = sorted(Path.cwd().rglob("*"))
    ended = quantkit(*arguments)
    words = " ".join(ended.err.replace("│", " ").split())
    assert ended.code in (1, 2), ended
    assert "Traceback" not in ended.err
    assert len(ended.err) < 5000
    assert ended.code == 2 or ended.err.strip().count("\n") == 0
    assert says in words, words
    assert sorted(Path.cwd().rglob("*")) == before
    return ended


@pytest.mark.parametrize(("value", "says"), [
    ("[" * 5000, "is not valid YAML"),
    ("{" + BOMB.replace("\n", ", ") + "}", "aliases stand for more than"),
    ("!!python/object/apply:os.system [true]", "group_size.int = '!!python/object/apply"),
    (NINES, "group_size = 999999"),
])  # fmt: skip
def test_a_value_of_an_option_is_not_believed(value, says, tiny):
    told("convert", tiny, "--method", "rtn", "--out", "out", "--group-size", value, says=says)


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_a_seed_that_no_generator_takes_is_refused(seed, tiny):
    told("convert", tiny, "--method", "gptq", "--out", "out", "--seed", seed, says="seed = ")
    told("imatrix", tiny, "--out", "out.gguf", "--seed", seed, says="seed = ")
    told("bench", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--seed", seed, says="seed = ")
    with pytest.raises(RecipeError, match="seed = "):
        compare(str(tiny), ["rtn"], out="out", seed=seed)
    assert quantkit("convert", tiny, "--method", "rtn", "--out", "out", "--seed", (1 << 63) - 1).code == 0


def test_a_home_that_is_not_there_and_numbers_beyond_all_measure_are_told(tiny):
    nobody = "~nobody-of-this-name/x"
    for words in (("verify", nobody), ("run", nobody), ("convert", tiny, "--method", "rtn", "--out", nobody)):
        told(*words, says="home directory")
    convert = ("convert", tiny, "--out", "out", "--method")
    for words in (
        ("eval", tiny, "--text", SAMPLE, "--threads", NINES),
        ("serve", tiny, "--print", "--port", NINES),
        (*convert, "gguf", "--bits", "auto", "--target-size", NINES),
        (*convert, "gptq", "--calibration-sequences", NINES),
        (*convert, NINES * 20),
        ("bench", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--duration", "1e308"),
    ):
        told(*words)
    for size, says in ((NINES, "larger than any disk"), ("9" * 100_000 + "x", "not a size")):
        with pytest.raises(RecipeError, match=says):
            parse_size(size, "target_size")
    words = (*convert, "gptq")
    for option, value in (("offload_gb", "nan"), ("max_memory_gb", "1e400"), ("max_memory_gb", "-1")):
        told(*words, "--" + option.replace("_", "-"), value, says=f"convert: {option} = ")


@pytest.mark.parametrize(("text", "says"), [
    (b"model: m\nmethod: rtn\noptions: " + b"{a: " * 3000, "is not valid YAML"),
    (b'model: "a\\0b"\nmethod: rtn', "model = 'a\\x00b' cannot be used: a string contains the character NUL"),
    (b'model: "\\uD800"\nmethod: rtn', "a string has half of a surrogate pair"),
    (b"model: " + b"m" * 5000 + b"\nmethod: rtn", "is longer than 4,096"),
    (b"model: m\nmethod: rtn\noptions: {a: " + b"9" * 400 + b"}", "more than 64 bits"),
    (b"model: m\nvariants: [" + b"{method: rtn}," * 1500 + b"]", "variants = "),
    (b"\xff\xfe\x00m", "is not UTF-8 text"),
    (b"x" * (2 << 20), "2,097,152 bytes"),
])  # fmt: skip
def test_a_recipe_is_not_believed(text, says):
    Path("recipe.yaml").write_bytes(text)
    ended = told("run", "recipe.yaml", says=says)
    assert ended.code == 1
    assert "recipe.yaml" in ended.err


@pytest.mark.parametrize("text", ["a\0b", "\udcff"])
def test_a_text_that_no_file_can_hold_is_refused_in_every_call(text, tiny):
    calls = [
        lambda: convert(text, "rtn", out="out"),
        lambda: convert(str(tiny), "rtn", text, "out"),
        lambda: convert(str(tiny), "gptq", out="out", calibration={**CALIBRATION, "text": text}),
        lambda: evaluate(str(tiny), text=text),
        lambda: compare(str(tiny), [text], out="out"),
        lambda: load_recipe(text),
    ]
    for call in calls:
        with pytest.raises(QuantkitError) as error:
            call()
        assert len(str(error.value)) < 1600
        assert str(error.value).isprintable()
    assert list(Path.cwd().iterdir()) == []


def test_a_recipe_that_is_a_pipe_is_not_waited_for_and_files_that_cannot_be_read_or_written_are_named(tiny):
    os.mkfifo("pipe.yaml")
    told("run", "pipe.yaml", says="the recipe pipe.yaml is not a file")
    memory = Path("/proc/self/mem")
    if not memory.exists():
        pytest.skip("this system has no file whose first byte cannot be read")
    told("convert", tiny, "--method", "gptq", "--out", "out", "--calibration-text", memory, says=str(memory))
    told("methods", "--json", memory, says=str(memory))
