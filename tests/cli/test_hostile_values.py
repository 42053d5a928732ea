"""Values of options and recipes that nobody should give: each is told in one line, at once, and nothing is made."""

import os
from pathlib import Path
from typing import Any

import pytest
from tiny_models import CALIBRATION, SAMPLE, Ended, quantkit

from quantkit.conversion.convert import convert
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluation.evaluate import evaluate
from quantkit.evaluation.tasks import evaluate_tasks
from quantkit.methods.gguf.imatrix import make_imatrix
from quantkit.recipe import CalibrationSpec, LoadTestSpec, load_recipe, parse
from quantkit.sweep.compare import compare
from quantkit.system.sizes import parse_size, told_apart

NINES = "9" * 400
BOMB = "{a: &a [1,1,1,1,1,1,1,1,1], b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a], c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b], "
BOMB += "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c], e: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d], f: [*e,*e,*e,*e,*e,*e,*e,*e,*e]}"


pytestmark = pytest.mark.usefixtures("here")


def told(*arguments: object, says: str = "") -> Ended:
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


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("[" * 5000, "is not valid YAML"),
        (BOMB, "aliases stand for more than"),
        ("2024-02-30", "group_size.int = '2024-02-30' cannot be used"),
        ("", "group_size.int = '' cannot be used"),
        ("!!python/object/apply:os.system [true]", "group_size.int = '!!python/object/apply"),
        ("&a [*a]", "group_size.int = '&a [*a]' cannot be used"),
        (NINES, "group_size = 999999"),
    ],
)
def test_a_value_of_an_option_is_not_believed(value: str, says: str, tiny: Path) -> None:
    told("convert", tiny, "--method", "rtn", "--out", "out", "--group-size", value, says=says)


@pytest.mark.parametrize("value", ["nan", "1e400", "-1"])
@pytest.mark.parametrize("option", ["offload_gb", "max_memory_gb"])
def test_memory_without_end_is_refused(option: str, value: str, tiny: Path) -> None:
    flag = "--" + option.replace("_", "-")
    told("convert", tiny, "--method", "gptq", "--out", "out", flag, value, says=f"convert: {option} = ")
    with pytest.raises(RecipeError, match=f"convert: {option} = "):
        convert(str(tiny), "gptq", out="out", **{option: float(value)})


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_a_seed_that_no_generator_takes_is_refused(seed: int, tiny: Path) -> None:
    told("convert", tiny, "--method", "gptq", "--out", "out", "--seed", seed, says="seed = ")
    told("imatrix", tiny, "--out", "out.gguf", "--seed", seed, says="seed = ")
    told("bench", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--seed", seed, says="seed = ")
    calls: list[Any] = [
        lambda: convert(str(tiny), "rtn", out="out", seed=seed),
        lambda: compare(str(tiny), ["rtn"], out="out", seed=seed),
        lambda: make_imatrix(str(tiny), Path("out.gguf"), seed=seed),
    ]
    for call in calls:
        with pytest.raises(RecipeError, match="seed = "):
            call()
    assert quantkit("convert", tiny, "--method", "rtn", "--out", "out", "--seed", (1 << 63) - 1).code == 0


NOBODY = "~nobody-of-this-name/x"


@pytest.mark.parametrize(
    "words",
    [
        ("convert", NOBODY, "--method", "rtn", "--out", "out"),
        ("convert", "TINY", "--method", "rtn", "--out", NOBODY),
        ("convert", "TINY", "--method", "rtn", "--out", "out", "--json", NOBODY),
        ("verify", NOBODY),
        ("run", NOBODY),
        ("bench", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--prompts", NOBODY),
    ],
)
def test_a_home_that_is_not_there_is_told(words: tuple[str, ...], tiny: Path) -> None:
    told(*(str(tiny) if word == "TINY" else word for word in words), says="home directory")


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "TINY", "--text", SAMPLE, "--threads", NINES),
        ("eval", "TINY", "--text", SAMPLE, "--threads", ",".join("1" * 2000)),
        ("eval-tasks", "TINY", "--tasks", "t", "--limit", NINES),
        ("serve", "TINY", "--print", "--port", NINES),
        ("convert", "TINY", "--method", "gguf", "--bits", "auto", "--target-size", NINES, "--out", "out"),
        ("convert", "TINY", "--method", "gguf", "--split-max-size", f"{NINES}GB", "--out", "out"),
        ("convert", "TINY", "--method", "gptq", "--calibration-sequences", NINES, "--out", "out"),
        ("convert", "TINY", "--method", NINES * 20, "--out", "out"),
        ("bench", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--requests", NINES),
        ("bench", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--duration", "1e308"),
        ("compare", "TINY", "--methods", "rtn,,gptq", "--out", "out"),
    ],
)
def test_numbers_beyond_all_measure_are_told(words: tuple[object, ...], tiny: Path) -> None:
    told(*(tiny if word == "TINY" else word for word in words))


@pytest.mark.parametrize(
    ("size", "says"), [(NINES, "more than any disk"), (f"{NINES}.5 GiB", "any disk"), ("9" * 100_000 + "x", "no size")]
)
def test_a_size_that_no_disk_has_is_told(size: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        parse_size(size, "target_size")


def test_two_sizes_are_told_so_that_they_differ() -> None:
    assert told_apart(12_000_000_000, 5_000_000) == ("12.00 GB", "0.01 GB")
    assert told_apart(1_200_000_001, 1_200_000_000) == ("1,200,000,001 bytes", "1,200,000,000 bytes")
    assert told_apart(900, 0) == ("0.9 kB", "0.0 kB")


def test_every_number_of_a_load_has_an_end() -> None:
    for name in LoadTestSpec.model_fields:
        with pytest.raises(RecipeError, match=f"bench: {name} = "):
            parse(LoadTestSpec, {name: 10**30}, "bench")


# Recipes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"model: m\nmethod: rtn\nseed: 2024-02-30", "is not valid YAML"),
        (b"model: m\nmethod: rtn\nseed: 2024-01-01", "seed = datetime.date(2024, 1, 1) cannot be used"),
        (b"model: m\nmethod: rtn\noptions: " + BOMB.encode(), "aliases stand for more than"),
        (b"model: m\nmethod: rtn\noptions: " + b"{a: " * 3000, "is not valid YAML"),
        (b'model: "a\\0b"\nmethod: rtn', "model = 'a\\x00b' cannot be used: a text holds the character NUL"),
        (b'model: m\nvariants: []\nevaluation: {text: "\\0"}', "evaluation.text = '\\x00' cannot be used"),
        (b'model: "\\uD800"\nmethod: rtn', "a text holds half of a character"),
        (b"model: " + b"m" * 5000 + b"\nmethod: rtn", "is longer than 4,096"),
        (b"model: m\nmethod: rtn\n" + b"? " + b"k" * 5000 + b"\n: 1", "unknown key"),
        (b"model: m\nmethod: rtn\noptions: {a: " + b"9" * 400 + b"}", "more than 64 bits"),
        (b"model: m\nmethod: rtn\nseed: .inf", "seed = inf cannot be used"),
        (b"model: m\nvariants: [" + b"{method: rtn}," * 1500 + b"]", "variants = "),
        (b"model: m\nmethod: rtn\n1: 2", "cannot be used"),
        (b"\xff\xfe\x00m", "is not UTF-8 text"),
        (b"x" * (2 << 20), "2,097,152 bytes"),
        (b"--- a\n--- b", "is not valid YAML"),
    ],
)
def test_a_recipe_is_not_believed(text: bytes, says: str) -> None:
    Path("recipe.yaml").write_bytes(text)
    ended = told("run", "recipe.yaml", says=says)
    assert ended.code == 1
    assert "recipe.yaml" in ended.err


def test_a_recipe_that_is_a_folder_a_pipe_or_no_name() -> None:
    Path("folder.yaml").mkdir()
    os.mkfifo("pipe.yaml")
    for name in ("folder.yaml", "pipe.yaml"):
        told("run", name, says=f"the recipe {name} is no file")
    with pytest.raises(QuantkitError):
        load_recipe(f"{'x' * 300}.yaml")


@pytest.mark.parametrize("text", ["a\0b", "\udcff", "x" * 5000])
def test_a_text_that_no_file_can_hold_is_refused_in_every_call(text: str, tiny: Path) -> None:
    calls: list[Any] = [
        lambda: convert(text, "rtn", out="out"),
        lambda: convert(str(tiny), "rtn", text, "out"),
        lambda: convert(str(tiny), "rtn", out="out", revision=text),
        lambda: convert(str(tiny), "gguf", out="out", imatrix_file=text),
        lambda: convert(str(tiny), "gptq", out="out", calibration={**CALIBRATION, "text": text}),
        lambda: evaluate(str(tiny), text=text),
        lambda: evaluate(str(tiny), text=str(SAMPLE), python=text),
        lambda: evaluate_tasks(str(tiny), (text,)),
        lambda: compare(str(tiny), [text], out="out"),
        lambda: load_recipe(text),
    ]
    for call in calls:
        with pytest.raises(QuantkitError) as error:
            call()
        assert len(str(error.value)) < 1600
        assert str(error.value).isprintable()
    assert list(Path.cwd().iterdir()) == []


def test_what_an_error_repeats_of_many_aliases_is_short() -> None:
    """90,000 values of 2,000 characters, in a file of 3 kB."""
    long = "x" * 2000
    text = f"a: &a {long}\nb: &b [{','.join(['*a'] * 300)}]\nc: [{','.join(['*b'] * 300)}]"
    Path("recipe.yaml").write_text(text)
    assert len(told("run", "recipe.yaml", says="unknown key").err) < 500
    with pytest.raises(RecipeError) as error:
        parse(CalibrationSpec, {"length": [[long] * 300] * 300}, "here")
    assert len(str(error.value)) < 400


def test_files_that_can_be_opened_and_not_read_or_written_are_named(tiny: Path) -> None:
    memory = Path("/proc/self/mem")
    if not memory.exists():
        pytest.skip("this system has no file whose first byte cannot be read")
    words = ("convert", tiny, "--method", "gptq", "--out", "out", "--calibration-text", memory)
    for command in (words, ("methods", "--json", memory)):
        ended = quantkit(*command)
        assert ended.code == 1
        assert ended.err.count("\n") == 1
        assert str(memory) in ended.err
