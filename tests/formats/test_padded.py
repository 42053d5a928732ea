"""Rows for tokens without one: the mean of the others, in every place that has a row for each token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import logits_of_llama_cpp
from quantized_folders import foreign
from safetensors.torch import load_file
from tiny_adapters import low_rank, save_adapter
from tiny_architectures import save_architecture
from tiny_models import CALIBRATION_FLAGS, EVALUATION, SAMPLE, changed_copy, quantkit, save_tiny
from tiny_multimodal import save_multimodal
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from quantkit import convert
from quantkit.artifact import open_artifact
from quantkit.conversion.check import check, prepare_job
from quantkit.conversion.manifest import fingerprint
from quantkit.data.texts import load_text
from quantkit.errors import QuantkitError, RecipeError, SourceError, UnsupportedError
from quantkit.evaluation.baseline import key_of
from quantkit.evaluation.engine_choice import choose
from quantkit.evaluation.evaluate import open_judged, prepare
from quantkit.evaluation.protocols import cut
from quantkit.formats.source import open_model, open_source
from quantkit.models.skeleton import load_whole
from quantkit.recipe import EngineSpec, EvaluationSpec

ROWS, MORE = 304, 2  # of the embedding, and tokens without one
IDS = torch.arange(3, 40)[None]


def add_tokens(model: Path, more: int = MORE) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(model)
    names = [f"<more{number}>" for number in range(len(tokenizer), ROWS + more)]
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names])
    assert len(tokenizer) == ROWS + more
    tokenizer.save_pretrained(model)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {
        "tied": add_tokens(save_tiny(place / "tied", num_hidden_layers=1)),
        "untied": add_tokens(save_tiny(place / "untied", num_hidden_layers=1, tie_word_embeddings=False)),
        "bias": add_tokens(save_architecture(place / "bias", "phi")),
    }


GROWN = {
    "tied": {"model.embed_tokens.weight"},
    "untied": {"model.embed_tokens.weight", "lm_head.weight"},
    "bias": {"model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"},
}


@pytest.mark.parametrize("name", GROWN)
def test_an_added_row_is_the_mean_and_all_others_are_read_through(name: str, models: dict[str, Path]) -> None:
    stored = load_file(models[name] / "model.safetensors")
    source = open_source(str(models[name]), pad_vocab=True)
    assert source.padded_rows == MORE
    assert source.config["vocab_size"] == ROWS + MORE
    assert source.tensors.keys() == stored.keys()
    for tensor, value in stored.items():
        if tensor in GROWN[name]:
            mean = value.double().mean(0, keepdim=True).to(value.dtype)
            value = torch.cat([value, mean.repeat(MORE, *[1] * (value.ndim - 1))])
        assert torch.equal(source.tensor(tensor), value), tensor
        assert source.info(tensor).nbytes == value.nbytes
        pieces = [source.floats(tensor, start, start + 7) for start in range(0, len(value), 7)]
        assert np.array_equal(np.concatenate(pieces), value.float().numpy())
    assert source.parameters == sum(source.info(tensor).parameters for tensor in stored)
    assert [note for note in source.notes if note.startswith("2 rows added to model.embed_tokens.weight")]


@pytest.mark.parametrize("name", GROWN)
def test_transformers_opens_what_computes_the_same_on_the_old_tokens(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    made = convert(str(models[name]), "float", "float32", tmp_path / "out", pad_vocab=True)
    assert made.manifest.source.padded_rows == MORE
    assert made.manifest.recipe.pad_vocab
    assert json.loads((made.folder / "config.json").read_text())["vocab_size"] == ROWS + MORE
    base = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32).eval()
    with torch.no_grad():
        copy = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32).eval()
        old, ours = base(IDS).logits, copy(IDS).logits
        assert torch.equal(ours[..., :ROWS], old)
        base.resize_token_embeddings(ROWS + MORE, mean_resizing=True)
        new = torch.tensor([[3, ROWS, 5, ROWS + 1, 7]])
        # Its rows are drawn around the mean; ours are rounded to bfloat16.
        torch.testing.assert_close(copy(new).logits, base(new).logits, rtol=0, atol=0.05 * float(old.abs().max()))
        assert float((copy(new).logits - base(new).logits).abs().mean()) < 0.005 * float(old.abs().max())


def test_llama_cpp_opens_the_file_and_computes_what_the_source_does(models: dict[str, Path], tmp_path: Path) -> None:
    made = convert(str(models["untied"]), "gguf", "F32", tmp_path / "out", pad_vocab=True)
    ids = [3, ROWS, 5, ROWS + 1, *range(7, 30)]
    ours = logits_of_llama_cpp(made.folder / made.manifest.weight_files[0], ids)
    whole, _ = load_whole(open_source(str(models["untied"]), pad_vocab=True), dtype="float32")
    with torch.no_grad():
        expected = whole.eval()(torch.tensor([ids])).logits[0]
    assert ours.shape == expected.shape == (len(ids), ROWS + MORE)
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_quantized_source_and_an_adapted_one(models: dict[str, Path], tmp_path: Path) -> None:
    """Adapters are merged first."""
    layer = "model.layers.0.mlp.up_proj"
    tensors = low_rank(models["untied"], [layer])
    tensors["lm_head.weight"] = torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(2))
    adapter = save_adapter(tmp_path / "style", tensors)
    quantized = foreign(convert(str(models["untied"]), "rtn", 4, tmp_path / "rtn"), tmp_path / "quantized")
    for folder, adapters in ((quantized, ()), (models["untied"], (adapter,))):
        plain = open_source(str(folder), None, adapters)
        source = open_source(str(folder), None, adapters, pad_vocab=True)
        head = plain.floats("lm_head.weight")
        assert np.array_equal(source.floats("lm_head.weight")[:ROWS], head)
        assert np.allclose(
            source.floats("lm_head.weight")[ROWS:], head.mean(0), atol=1e-3 if folder == quantized else 1e-6
        )
        assert np.array_equal(source.floats(f"{layer}.weight"), plain.floats(f"{layer}.weight"))
        assert source.adapters == plain.adapters
        assert source.notes[: len(plain.notes)] == plain.notes
    with pytest.raises(UnsupportedError, match="--pad-vocab, whose values have no codes"):
        convert(str(quantized), "keep", 4, tmp_path / "kept", pad_vocab=True)


def test_a_multimodal_source(tmp_path: Path) -> None:
    whole = add_tokens(save_multimodal(tmp_path / "gemma3", "gemma3"))
    made = convert(str(whole), "float", "bfloat16", tmp_path / "padded", pad_vocab=True).folder
    with torch.no_grad():
        before, after = (
            AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits
            for folder in (whole, made)
        )
    assert after.shape[-1] == ROWS + MORE
    assert torch.equal(after[..., :ROWS], before)


def test_nothing_changes_where_no_row_lacks(one_block: Path, models: dict[str, Path], tmp_path: Path) -> None:
    plain, source = open_source(str(one_block)), open_source(str(one_block), pad_vocab=True)
    assert type(source) is type(plain)
    assert source.hashes == plain.hashes
    artifact = convert(str(models["tied"]), "rtn", 4, tmp_path / "out")
    text = (artifact.folder / "quantkit.json").read_text()
    assert "pad_vocab" not in text
    assert "padded_rows" not in text
    assert any("(--pad-vocab adds rows)" in note for note in artifact.manifest.notes)
    with pytest.raises(RecipeError, match="was made without it"):
        open_model(artifact.folder, pad_vocab=True)
    with pytest.raises(RecipeError, match="when it is opened"):
        open_model(plain, pad_vocab=True)


def test_a_tokenizer_of_another_model_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    def small(tensors: dict[str, Any]) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:100].contiguous()

    model = changed_copy(models["tied"], tmp_path / "small", small, vocab_size=100)
    with pytest.raises(SourceError, match="306 tokens and the embedding 100 rows: most would mean nothing"):
        open_source(str(model), pad_vocab=True)


# Evaluations, and what is used again


def test_an_artifact_is_evaluated_against_the_rows_that_it_was_made_with(
    models: dict[str, Path], tmp_path: Path
) -> None:
    artifact = convert(str(models["untied"]), "float", "float32", tmp_path / "out", pad_vocab=True)
    opened, source = open_judged(artifact.folder, None, models["untied"])
    assert source is not None
    assert source.padded_rows == MORE
    spec, text = EvaluationSpec(**EVALUATION), load_text(EVALUATION["text"], "evaluation")
    assert prepare(opened, spec, text, choose(opened, EngineSpec()), source).exact is source
    with pytest.raises(QuantkitError, match=r"made with 2 rows added .* has 0"):
        prepare(opened, spec, text, choose(opened, EngineSpec()), open_source(str(models["untied"])))


def test_whatever_is_kept_has_another_key(models: dict[str, Path], tmp_path: Path) -> None:
    """Unfinished work, baselines, and windows of unfinished evaluations."""
    text, plain = load_text(EVALUATION["text"], "evaluation"), open_source(str(models["untied"]))
    windows = cut(text, plain.tokenizer(), "llama.cpp", 64, 2, plain.config)

    def keys(model: Path, padded: bool) -> tuple[object, ...]:
        job = check(prepare_job(str(model), "rtn", 4, pad_vocab=padded), tmp_path / "out").job
        work = {name: value for name, value in fingerprint(job).items() if name not in ("recipe", "side_files")}
        assert (fingerprint(job)["recipe"].get("pad_vocab", False)) is padded
        opened = open_model(str(model), pad_vocab=padded)
        judgement = prepare(opened, EvaluationSpec(**EVALUATION), text, choose(opened, EngineSpec()))
        return json.dumps(work), key_of(job.source, windows, "float32"), judgement.fingerprint(None), opened.digest

    same = keys(models["untied"], True)
    assert keys(models["untied"], True) == same
    more = add_tokens(shutil.copytree(models["untied"], tmp_path / "untied"), MORE + 1)
    for others in (keys(models["untied"], False), keys(more, True)):
        assert all(one != other for one, other in zip(same, others, strict=True))


def test_commands_and_recipes_say_it(models: dict[str, Path], tmp_path: Path) -> None:
    for command in ("convert", "compare", "eval-ppl", "eval", "eval-tasks", "bench", "imatrix"):
        assert "--pad-vocab" in quantkit(command, "--help").out, command
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {models['untied']}\npad_vocab: true\nmethod: float\nbits: float32\nout: {tmp_path / 'out'}\n"
    )
    ended = quantkit("run", recipe)
    assert ended.code == 0, ended.err
    assert open_artifact(tmp_path / "out").manifest.source.padded_rows == MORE
    text = tmp_path / "text.txt"  # with a token that has no row
    text.write_text("<more304> " + SAMPLE.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    flags = ["--calibration-text", text, *CALIBRATION_FLAGS[2:]]
    for padded in ([], ["--pad-vocab"]):
        ended = quantkit("imatrix", models["untied"], *padded, "--out", tmp_path / "made", *flags)
        assert (ended.code == 0) == bool(padded), ended.err
    model = open_model(str(models["untied"]), pad_vocab=True)
    assert choose(model, EngineSpec()).load_request(model, 1).pad_vocab
