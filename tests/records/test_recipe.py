from pathlib import Path

import pytest
import yaml
from tiny_models import CALIBRATION, CALIBRATION_FLAGS, EVALUATION, EVALUATION_FLAGS, quantkit

from quantkit.comparison import compare as comparison
from quantkit.comparison.compare import compare
from quantkit.conversion.check import prepare
from quantkit.conversion.convert import convert
from quantkit.errors import RecipeError
from quantkit.records.recipe import (
    CalibrationSpec,
    ConvertRecipe,
    ConvertRun,
    EvaluationSpec,
    Variant,
    load_recipe,
    parse,
)
from quantkit.records.report import Measurement


def test_file_call_and_command_line_make_the_same_artifact(tiny, tmp_path):
    called = convert(str(tiny), "rtn", 4, tmp_path / "a", calibration=CALIBRATION, seed=3, group_size=64, sym=False)
    file = tmp_path / "recipe.yaml"
    recipe = {
        "model": str(tiny), "method": "rtn", "bits": 4, "options": {"group_size": 64, "sym": False},
        "calibration": CALIBRATION, "seed": 3, "out": str(tmp_path / "b"),
    }  # fmt: skip
    file.write_text(yaml.safe_dump(recipe))
    assert quantkit("run", file).code == 0
    flags = ["--bits", "4", "--group-size", "64", "--no-sym", "--seed", 3, "--out", tmp_path / "c"]
    assert quantkit("convert", tiny, "--method", "rtn", *CALIBRATION_FLAGS, *flags).code == 0
    texts = {(tmp_path / name / "quantkit.json").read_text() for name in "abc"}
    assert len(texts) == 1
    assert called.manifest.recipe == ConvertRecipe(  # without places on this machine
        model=tiny.name, method="rtn", bits="4", options={"group_size": 64, "sym": False},
        calibration=CalibrationSpec(**CALIBRATION | {"text": Path(CALIBRATION["text"]).name}), seed=3,
    )  # fmt: skip
    for method, bits, kept in (("gguf", "q8_0", "Q8_0"), ("rtn", None, "4")):  # in the spelling of the method
        assert prepare(ConvertRun(model=str(tiny), method=method, bits=bits)).recipe.bits == kept


class _Asked(Exception):  # noqa: N818 - carries a recipe out of a call
    pass


def test_file_call_and_command_line_ask_for_the_same_comparison(tiny, tmp_path, monkeypatch):
    def note(recipe, *_):
        raise _Asked(recipe)

    monkeypatch.setattr(comparison, "run_comparison", note)
    evaluation = {**EVALUATION, "threads": [1, 2]}
    variants = [{"method": "rtn", "bits": 4}, {"method": "gguf", "bits": "Q2_K"}, {"method": "nf4"}]
    rest = {"calibration": CALIBRATION, "evaluation": evaluation, "seed": 5, "out": "there"}
    recipe = {"model": str(tiny), "variants": variants, **rest}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(_Asked) as from_file:
        quantkit("run", tmp_path / "recipe.yaml")
    flags = [*CALIBRATION_FLAGS, *EVALUATION_FLAGS, "--threads", "1,2", "--seed", 5, "--out", "there"]
    with pytest.raises(_Asked) as from_command:
        quantkit("compare", tiny, "--methods", "rtn:4,gguf:Q2_K,nf4", *flags)
    with pytest.raises(_Asked) as from_call:
        compare(str(tiny), ["rtn:4", Variant(method="gguf", bits="Q2_K"), {"method": "nf4"}], **rest)
    assert from_file.value.args == from_command.value.args == from_call.value.args
    assert [variant.label for variant in from_file.value.args[0].variants] == ["rtn-4", "gguf-Q2_K", "nf4"]


def test_labels_name_method_bits_and_options_and_those_of_long_options_are_short_and_differ():
    options = {"sym": False, "group_size": 32}
    assert (
        Variant.model_validate({"method": "gptq", "bits": 4, "options": options}).label
        == "gptq-4 group_size=32 sym=False"
    )
    variant = {"method": "rtn", "options": {"sym": False}, "format": "awq"}
    assert Variant.model_validate(variant).label == "rtn sym=False format=awq"
    variant = {"method": "gptq", "options": {"layer_bits": {"a": 8, "b": 3}}}
    assert Variant.model_validate(variant).label == "gptq layer_bits=a=8,b=3"
    assert Variant.model_validate("ctranslate2:int8").label == "ctranslate2-int8"
    """As the recipe of a choice has them: each layer with its bits."""
    one = {f"model.layers.{n}.mlp.down_proj": 4 for n in range(80)}
    others = [{**one, "model.layers.79.mlp.down_proj": 8}, {name.replace("down", "up"): 4 for name in one}]
    variants = [{"method": "gptq", "bits": "auto", "options": {"layer_bits": bits}} for bits in (one, *others)]
    labels = [Variant.model_validate(variant).label for variant in variants]
    assert max(map(len, labels)) < 100
    assert len(set(labels)) == 3


@pytest.mark.parametrize(("text", "says"), [
    ("model: m\nmethod: rtn\nsed: 1", "unknown key 'sed'. Did you mean 'seed'?"),
    ("model: m\nvariants: [{method: rtn, bis: 4}]", "'variants.0.bis'. Did you mean 'bits'?"),
    ("model: m\nmethod: rtn\ncalibration: {length: 1}", "calibration.length = 1 cannot be used"),
    ("method: rtn", "the key 'model' is missing"),
])  # fmt: skip
def test_a_wrong_key_or_value_is_named(text, says, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(tmp_path / "recipe.yaml")
    assert str(error.value).startswith(f"{tmp_path / 'recipe.yaml'}: ")
    assert says in str(error.value)


@pytest.mark.parametrize(("record", "values", "key"), [
    (CalibrationSpec, {"sequences": True}, "sequences"),
    (EvaluationSpec, {"threads": [True]}, "threads"),
    (Measurement, {"name": "x", "value": 1.0, "unit": "", "details": {"p99": True}}, "details"),
])  # fmt: skip
def test_true_is_no_number(record, values, key):
    """To Python it is 1."""
    with pytest.raises(RecipeError, match=f"here: {key} = .* cannot be used: it is neither a number nor a string"):
        parse(record, values, "here")
