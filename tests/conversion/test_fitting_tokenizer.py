"""A tokenizer and a text must fit the model: asked before the work, for every method."""

import json

import pytest
from edits import edit_json, put
from tiny_architectures import save_architecture
from tiny_models import CALIBRATION, EVALUATION, changed_copy
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit import evaluate
from quantkit.conversion.convert import convert
from quantkit.errors import EngineError, SourceError, UnsupportedError
from quantkit.methods.gguf.imatrix import make_imatrix
from quantkit.models.config import note_beyond_context
from quantkit.records.recipe import CalibrationSpec


def refused(model, method, error, says, **settings):
    """The conversion must be refused before anything is written."""
    out = model.parent / "out"
    with pytest.raises(error, match=says):
        convert(str(model), method, out=out, calibration={**CALIBRATION, **settings})
    assert not out.exists()
    assert not out.with_name("out.partial").exists()


@pytest.mark.parametrize("method", ["rtn", "gptq", "gguf", "ctranslate2"])
def test_a_source_without_a_tokenizer_or_a_row_of_the_embedding_is_refused(method, tiny, tmp_path):
    """One row is missing, of a token that no short text has."""
    rows = max(AutoTokenizer.from_pretrained(tiny).get_vocab().values())

    def cut(tensors):
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:rows].contiguous()

    model = changed_copy(tiny, tmp_path / "model", cut, vocab_size=rows)
    found = rf"its vocabulary the token ids \d+ to {rows}"
    refused(model, method, SourceError, rf"{found}.*model.resize_token_embeddings")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    refused(model, method, SourceError, "tokenizer")


def with_added_token(tiny, folder, every_text):
    """A model whose tokenizer has one token more than the embedding, which it puts before every text, or not."""
    model = changed_copy(tiny, folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rows = json.loads((tiny / "config.json").read_text())["vocab_size"]
    while len(tokenizer) <= rows:
        tokenizer.add_tokens([AddedToken(f"<more{len(tokenizer)}>", special=True)])
    if every_text:
        name = f"<more{rows}>"
        template = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, rows)])
        tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(model)
    return model


def test_an_added_token_without_a_row_gets_a_note_and_one_in_every_text_is_refused(tiny, tmp_path):
    unused = with_added_token(tiny, tmp_path / "unused", every_text=False)
    made = convert(str(unused), "rtn", out=tmp_path / "made")
    assert [note for note in made.manifest.notes if "added tokens that the model has no row for: '<more" in note]
    edit_json(unused / "generation_config.json", put("eos_token_id", value=[2, 304]))  # as published models have it
    edit_json(unused / "tokenizer_config.json", put("extra_special_tokens", value=["<listed>", "</s>"]))
    notes = convert(str(unused), "rtn", out=tmp_path / "listed").manifest.notes
    assert [note for note in notes if "no row for: '<more304>', '<listed>'" in note]
    assert (
        "eos_token_id is [2, 304], but the embedding has 304 rows: the model can neither read nor generate this token"
        in notes
    )
    used = with_added_token(tiny, tmp_path / "used", every_text=True)
    refused(used, "rtn", SourceError, "the tokenizer gives every text the token ids")


def test_a_padding_token_without_a_row_is_named_where_transformers_builds_no_model(tiny, tmp_path):
    folder = changed_copy(tiny, tmp_path / "model", pad_token_id=304)
    says = "config.json has pad_token_id = 304, but the embedding has 304 rows: set it to null"
    refused(folder, "rtn", UnsupportedError, says)
    with pytest.raises(EngineError, match=says):
        evaluate(str(folder), ["perplexity"], **EVALUATION)
    edit_json(folder / "config.json", put("pad_token_id", value=None))
    convert(str(folder), "rtn", out=tmp_path / "out")


@pytest.mark.parametrize(("method", "bits"), [("gguf", "Q8_0"), ("ctranslate2", "int8"), ("rtn", "4")])
def test_ends_of_a_text_that_a_format_does_not_name_are_noted(method, bits, tiny, tmp_path):
    folder = changed_copy(tiny, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    notes = convert(str(folder), method, bits, tmp_path / "out").manifest.notes
    assert any("the model also ends texts with" in note and "(5)" in note for note in notes) == (method != "rtn")
    edit_json(folder / "generation_config.json", put("eos_token_id", value=2))
    notes = convert(str(folder), method, bits, tmp_path / "one").manifest.notes
    assert not any("also ends texts" in note for note in notes)


def test_the_advice_adds_the_rows(tiny, tmp_path):
    folder = with_added_token(tiny, tmp_path / "model", every_text=False)
    edit_json(folder / "tokenizer.json", lambda values: values["model"]["vocab"].update(z=309))  # ids with a hole
    with pytest.raises(SourceError, match="token ids 3 to 309, but the embedding has 304 rows") as refusal:
        convert(str(folder), "gguf", "Q8_0", tmp_path / "out")
    advice = str(refusal.value).partition("with transformers: ")[2]
    names = {"model": AutoModelForCausalLM.from_pretrained(folder), "tokenizer": AutoTokenizer.from_pretrained(folder)}
    exec(advice, names | {"folder": folder})
    assert convert(str(folder), "gguf", "Q8_0", tmp_path / "out").manifest.source.config["vocab_size"] == 310


def test_calibration_beyond_the_context_gets_a_note(tiny, tmp_path):
    note = "calibration sequences of 32 tokens are longer than the model's context of 16 tokens"
    for context, want in ((16, [note]), (32, [])):
        model = changed_copy(tiny, tmp_path / f"{context}", max_position_embeddings=context)
        made = convert(str(model), "gptq", out=tmp_path / f"out {context}", calibration=CALIBRATION)
        assert [n for n in made.manifest.notes if n.startswith("calibration sequences of")] == want


def test_calibration_beyond_a_table_of_positions_is_refused(tmp_path):
    model = save_architecture(tmp_path / "gpt2", "gpt2", changes={"n_positions": 24})
    says = "calibration sequences of 25 tokens are longer than the model's 24 positions"
    refused(model, "gptq", UnsupportedError, says, length=25)
    spec = CalibrationSpec(**{**CALIBRATION, "length": 25})
    with pytest.raises(UnsupportedError, match=says):
        make_imatrix(str(model), tmp_path / "imatrix.gguf", calibration=spec)
    convert(str(model), "gptq", out=tmp_path / "out", calibration={**CALIBRATION, "length": 24, "sequences": 2})


def test_what_a_context_is():
    def note(length, **config):
        return note_beyond_context(config, length, "windows") is not None

    assert note(9, text_config={"max_position_embeddings": 8})
    assert not note(9, max_position_embeddings=8, alibi=True)
    assert not note(9, model_type="bloom")
