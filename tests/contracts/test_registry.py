"""What every file of the three folders owes to the rest, whatever it holds."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import quantkit
from quantkit.contracts import registry
from quantkit.contracts.registry import find_format, find_format_for, find_method, formats, formats_for, methods
from quantkit.errors import RecipeError
from quantkit.records.recipe import Strict

PACKAGE = Path(quantkit.__file__).parent
every_method = pytest.mark.parametrize("method", methods().values(), ids=lambda method: method.name)


def files(folder):
    """Names in a folder but those that begin with an underscore, which is a dash else, and the one that opens."""
    stems = {path.stem for path in (PACKAGE / folder).iterdir()} - {registry.OPENER}
    return {stem.replace("_", "-") for stem in stems if not stem.startswith("_")}


@pytest.mark.parametrize("registered", [methods, formats, registry.engines])
def test_the_file_name_is_the_name(registered):
    records = registered()
    assert len(records) > 3
    assert set(records) == files(registered.__name__)
    assert all(name == record.name for name, record in records.items())


@every_method
def test_bits_are_found_in_any_case_and_options_are_strict_described_and_no_flags_of_the_command(method):
    from typer.main import get_command

    from quantkit.cli.app import make_app

    taken = {flag for p in get_command(make_app()).commands["convert"].params for flag in p.opts}
    assert method.default_bits in method.bits
    assert method.parse_bits(None) == method.default_bits
    for bits in method.bits:
        assert method.parse_bits(bits.lower()) == method.parse_bits(bits.upper()) == bits
    with pytest.raises(RecipeError, match=f"{method.name} has no bits '17'"):
        method.parse_bits(17)
    assert issubclass(method.Options, Strict)
    options = method.parse_options({})
    for name, field in method.Options.model_fields.items():
        assert field.description, name
        assert not field.is_required(), name
        assert "--" + name.replace("_", "-") not in taken
        with pytest.raises(ValidationError, match="frozen"):
            setattr(options, name, field.default)
        with pytest.raises(RecipeError, match=f"Did you mean '{name}'"):
            method.parse_options({name + "e": 1})
    with pytest.raises(RecipeError, match="unknown key"):
        method.parse_options({"no_such_option": 1})


@every_method
def test_a_method_has_formats_and_is_refused_others(method):
    assert method.summary
    assert method.reference
    assert formats_for(method)[0] == method.default_format
    assert all(method.makes in find_format(name).holds for name in formats_for(method))
    assert find_format_for(method, None) is find_format(method.default_format)
    assert all(find_format_for(method, name).name == name for name in formats_for(method))


@pytest.mark.parametrize("name", [name for name, kind in formats().items() if kind.holds])
def test_the_refusal_of_a_format_names_a_command_that_writes_it(name):
    other = next(method for method in methods().values() if name not in formats_for(method))
    with pytest.raises(RecipeError) as raised:
        find_format_for(other, name)
    command = str(raised.value).partition(" such as quantkit convert MODEL ")[2].split(" ")
    given = dict(zip(command[::2], command[1::2], strict=True))
    method = find_method(given["--method"])
    assert method.parse_bits(given["--bits"]) == method.default_bits
    assert find_format_for(method, given.get("--format"), given["--bits"]).name == name


LIGHT = """
import quantkit; quantkit.QuantkitError
quantkit.open_artifact, quantkit.Report, quantkit.load_recipe, quantkit.Table
import quantkit.cli.app
import quantkit.evaluation.worker
from quantkit.contracts.registry import find_engine; find_engine('llamacpp'); find_engine('ctranslate2')
"""


def test_nothing_heavy_is_loaded_before_it_is_used():
    heavy = "[m for m in ('torch', 'transformers', 'matplotlib', 'datasets', 'bitsandbytes') if m in sys.modules]"
    lines = [f"{line}\nassert not {heavy}, {heavy}" for line in LIGHT.strip().splitlines()]
    command = [sys.executable, "-c", "\n".join(["import sys", *lines])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
