import os
from typing import Annotated, Literal

import pytest
import typer
from made_up_reports import sheet
from pydantic import Field
from tiny_models import fails, quantkit
from typer.testing import CliRunner

from quantkit.cli.app import make_app
from quantkit.cli.convert import method_options
from quantkit.cli.options import Command, Fields, Values, with_options, writable
from quantkit.contracts.registry import find_method
from quantkit.errors import OutputError
from quantkit.records.recipe import CalibrationSpec, EngineSpec, LoadTestSpec, Positive, Strict


class Drink(Strict):
    name: str = Field(description="what it is called")
    volume: int | Literal["large"] = Field("large", description="litres; default: a lot")
    price: Positive | None = Field(None, description="in any currency")
    sweet: bool = Field(True, description="with sugar")
    days: tuple[int, ...] = Field((), description="days, such as 1,2")
    guests: tuple[str, ...] = Field((), description="who drinks it")
    mixed: dict[str, int] | None = Field(None, description="what is in it")


HOT = Fields(Drink, prefix="hot_")


def order(*arguments, fields=HOT):
    """Run a command that takes the fields; its exit code, what it was given, and what it said."""
    given = {}

    def command(count: int, *, drink: Annotated[Values, fields]) -> None:
        given.update(drink, count=count)

    small = typer.Typer(add_completion=False)
    small.command(cls=Command)(with_options(command))
    ended = CliRunner().invoke(small, ["3", *arguments])
    return ended.exit_code, given, " ".join(ended.output.replace("│", " ").split())


def test_fields_become_options_with_their_defaults_and_types():
    code, given, _ = order("--hot-name", "tea")
    assert (code, given) == (0, {"name": "tea", "volume": "large", "sweet": True, "count": 3})
    words = "--hot-name 12 --hot-volume 3 --hot-price 2.5 --no-hot-sweet --hot-days 1,2 --hot-guests a,b --hot-mixed"
    code, given, _ = order(*words.split(), "{milk: 1}")
    assert code == 0
    assert given == {
        "name": "12", "volume": 3, "price": 2.5, "sweet": False, "days": (1, 2), "guests": ("a", "b"),
        "mixed": {"milk": 1}, "count": 3,
    }  # fmt: skip
    assert order("--name", "tea", fields=Fields(Drink, ("sweet",)))[0] == 2
    assert order("--name", "tea", fields=Fields(Drink, unset=True))[1] == {"name": "tea", "count": 3}
    _, _, text = order("--help")
    for part in ("Litres. Default: a lot.", "[required]", "[default: large]", "--no-hot-sweet"):
        assert part in text


def options_in(*words):
    """What `convert` reads of these words of the command line: the method's options, and the rest."""
    command = typer.main.get_command(make_app(["convert", *words])).commands["convert"]
    params = command.make_context("convert", list(words)).params
    given = method_options(words).take(params)
    return given, params


def test_click_reads_the_options_of_the_method_and_of_no_other():
    # Wherever they stand, beside the command's own.
    words = "--group-size -1 --no-sym"
    for line in (f"demo --method gptq {words} --seed 3", f"{words} demo --seed 3 --method=gptq"):
        given, params = options_in(*line.split())
        assert given == {"group_size": -1, "sym": False}
        assert (params["model"], params["seed"]) == ("demo", 3)
    # Sizes and tables are values, too.
    words = "--target-size 90MB --tensor-type a=Q6_K,b=Q5_K"
    given, _ = options_in("demo", "--method", "gguf", *words.split())
    assert given == {"target_size": "90MB", "tensor_type": "a=Q6_K,b=Q5_K"}
    find_method("gguf").parse_options(given)
    ended = quantkit("convert", "demo", "--method", "nf4", "--group-size", "64")
    assert ended.code == 2
    assert "no such option --group-size. Options of nf4: --double-quant, --compute-dtype" in ended.err


@pytest.mark.parametrize(
    ("command", "record", "prefix"),
    [("convert", CalibrationSpec, "calibration-"), ("eval", EngineSpec, ""), ("bench", LoadTestSpec, "")],
)
def test_a_command_has_an_option_for_each_field(command, record, prefix):
    text = quantkit(command, "--help").out
    for name, field in record.model_fields.items():
        assert f"--{prefix}{name.replace('_', '-')} " in text
        assert field.description


def test_an_existing_file_is_overwritten_only_if_its_suffix_is_the_results(tmp_path):
    table = tmp_path / "measured.json"
    table.write_text(sheet(1, 2).to_json())
    for suffix, words in ((".json", ("methods", "--json")), (".html", ("report", table, "--out"))):
        fine, other, empty = tmp_path / f"fine{suffix}", tmp_path / f"other{suffix}.txt", tmp_path / f"empty{suffix}.1"
        fine.write_text("mine")
        other.write_text("mine")
        empty.touch()  # as mktemp makes it
        assert quantkit(*words, fine).code == quantkit(*words, empty).code == 0
        assert fine.read_bytes() == empty.read_bytes()
        fails(*words, other, says=f"{other} exists; only {suffix} files are overwritten.")
        assert other.read_text() == "mine"
    os.mkfifo(tmp_path / "pipe")
    check = writable(".json")
    for name in ("quantkit.json", "config.json", "tokenizer.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(OutputError, match=f"{name} exists and seems to belong to a model"):
            check(tmp_path / name)
    assert (check(tmp_path / "pipe"), check(None)) == (tmp_path / "pipe", None)
