import json
from unittest.mock import Mock

import gguf
import pytest
import yaml
from gguf_files import file_in, identical_tensors, quantized_by_llama_cpp, save_model, take_any_tokenizer
from tiny_architectures import save_architecture
from tiny_models import CALIBRATION, SAMPLE, changed_copy

from quantkit.calibration import sensitivity
from quantkit.conversion import convert as conversion
from quantkit.errors import RecipeError
from quantkit.formats.gguf.file_types import TENSOR_TYPES
from quantkit.formats.gguf.ggml.library import IMPORTANCE_ONLY
from quantkit.formats.gguf.plan import make_plan
from quantkit.formats.source import open_source
from quantkit.methods.gguf import mixed_precision
from quantkit.methods.gguf.mixed_precision import candidates, free_tensors
from quantkit.records.recipe import ConvertRun, parse
from quantkit.system.files import sha256_of
from quantkit.system.sizes import parse_size

pytestmark = pytest.mark.usefixtures("fresh_cache")


@pytest.fixture
def one_block(once):
    return once("gguf-one-block", lambda folder: save_model(folder, num_hidden_layers=1))


def convert(model, out, bits="auto", **options):
    return conversion.convert(str(model), "gguf", bits, out, calibration=CALIBRATION, **options)


def types_in(artifact):
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file_in(artifact.folder)).tensors}


def test_tensors_take_the_types_that_are_asked_for(wide, tmp_path):
    want = types_in(convert(wide, tmp_path / "plain", "Q4_K_M"))
    for name in want:
        if ".attn_" in name and not name.endswith("norm.weight"):
            want[name] = "Q5_K"
    want |= {"blk.1.attn_v.weight": "Q8_0", "output.weight": "Q4_0"}
    given = {"attn_": "Q5_K", r"blk\.1\.attn_v": "Q8_0", "^output\\.": "Q4_0"}
    artifact = convert(wide, tmp_path / "given", "Q4_K_M", tensor_type=given)
    assert types_in(artifact) == want
    as_text = convert(wide, tmp_path / "text", "Q4_K_M", tensor_type=r"attn_=Q5_K,blk.1.attn_v=Q8_0, ^output\.=Q4_0")
    assert sha256_of(file_in(as_text.folder)) == sha256_of(file_in(artifact.folder))


@pytest.mark.parametrize(("tied", "types"), [
    (False, {"token_embedding_type": "Q4_K", "output_tensor_type": "Q8_0"}),
    (False, {"output_tensor_type": "Q4_K"}),
    (True, {"token_embedding_type": "Q3_K"}),
])  # fmt: skip
def test_embedding_and_head_have_llama_quantizes_bytes(tied, types, tmp_path):
    model = save_model(tmp_path / "model", num_hidden_layers=1, tie_word_embeddings=tied)
    plain = convert(model, tmp_path / "plain", "BF16")
    theirs = quantized_by_llama_cpp(file_in(plain.folder), tmp_path / "theirs.gguf", "Q4_K_M", **types)
    artifact = convert(model, tmp_path / "ours", "Q4_K_M", **types)
    assert identical_tensors(file_in(artifact.folder), theirs) == (11 if tied else 12)
    outside = [t for t in gguf.GGUFReader(theirs).tensors if t.name in ("token_embd.weight", "output.weight")]
    bits = 8 * sum(t.n_bytes for t in outside) / sum(t.n_elements for t in outside)
    last = f"token_embd.weight {outside[-1].tensor_type.name}"
    [note] = [note for note in artifact.manifest.notes if last in note]
    assert f": {bits:.2f} bits per weight, " in note
    assert artifact.manifest.options["output_tensor_type"] == types.get("output_tensor_type")
    if tied:
        with pytest.raises(RecipeError, match=r"tied to its embedding\. Give token_embedding_type"):
            convert(model, tmp_path / "out", "Q4_K_M", output_tensor_type="Q8_0")


def test_a_type_that_does_not_fit_falls_back_and_is_told(tmp_path):
    narrow = save_model(tmp_path / "narrow", num_hidden_layers=1, hidden_size=96)
    artifact = convert(narrow, tmp_path / "out", "Q8_0", tensor_type={"attn_q": "Q3_K"})
    assert types_in(artifact)["blk.0.attn_q.weight"] == "Q4_0"
    assert any("1 Q3_K -> Q4_0" in note for note in artifact.manifest.notes)


def test_a_size_is_kept_and_used(wide, tmp_path):
    sizes = [450_000, 830_000]
    harms = []
    for size in sizes:
        artifact = convert(wide, tmp_path / str(size), target_size=f"{size / 1000}KB")
        total = file_in(artifact.folder).stat().st_size
        weights = sum(t.n_bytes for t in gguf.GGUFReader(file_in(artifact.folder)).tensors)
        assert 0.97 * size < total <= size, (total, weights)
        note = next(note for note in artifact.manifest.notes if note.startswith("types chosen by sensitivity"))
        harms.append(float(note.split("divergence ")[1].split()[0]))
        assert len(set(types_in(artifact).values())) > 2
    assert harms[0] > 2 * harms[1]
    same = convert(wide, tmp_path / "divergence", target_kld=1.001 * harms[1])
    assert file_in(same.folder).stat().st_size <= sizes[1]
    assert file_in(same.folder).stat().st_size > sizes[0]


def test_iq_types_are_chosen_where_there_is_an_importance(wide, tmp_path):
    artifact = convert(wide, tmp_path / "out", target_bpw=3.0)
    assert 2.9 < 8 * file_in(artifact.folder).stat().st_size / artifact.manifest.source.parameters <= 3.0
    assert {"IQ2_XXS", "IQ3_XXS"} & {kind for name, kind in types_in(artifact).items() if name.startswith("blk.")}
    plan = make_plan(open_source(str(wide)), "auto")
    for tensor in free_tensors(plan)[0]:
        kinds = set(candidates(tensor))
        assert {"IQ3_S", "IQ4_XS", "Q2_K", "Q8_0"} <= kinds
        assert bool(IMPORTANCE_ONLY & kinds) == (tensor.name not in ("token_embd.weight", "output.weight"))


def test_the_recipe_beside_the_file_gives_the_same_file(one_block, tmp_path):
    artifact = convert(one_block, tmp_path / "chosen", target_bpw=5.0, rounding="gptq")
    values = yaml.safe_load((artifact.folder / "recipe.yaml").read_text())
    recipe = parse(ConvertRun, values | {"model": str(one_block), "calibration": CALIBRATION}, "recipe")
    assert set(recipe.options["tensor_type"]) == {n for n in types_in(artifact) if not n.endswith("norm.weight")}
    assert f"({len(recipe.options['tensor_type'])} in all)" in (artifact.folder / "README.md").read_text()
    again = convert(one_block, tmp_path / "again", str(recipe.bits), **recipe.options)
    assert types_in(again) == types_in(artifact)
    assert sha256_of(file_in(again.folder)) == sha256_of(file_in(artifact.folder))


@pytest.mark.parametrize(("bits", "options", "said"), [
    ("auto", {}, "bits auto needs --target-size, --target-bpw or --target-kld"),
    ("auto", {"target_size": "20KB"}, "the target is .* MB. Give a larger"),
    ("Q4_K_M", {"token_embedding_type": "Q9"}, "token_embedding_type = 'Q9' is not a type"),
    ("Q4_K_M", {"tensor_type": {"attn": "Q4_X"}}, "attn = 'Q4_X' is not a type. Did you mean"),
    ("Q4_K_M", {"tensor_type": {"attn(": "Q4_K"}}, "is not a regular expression"),
    ("Q4_K_M", {"tensor_type": "attn_zz=Q4_K"}, "the pattern 'attn_zz' matches no tensor's name"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_any_work(wide, tmp_path, bits, options, said, monkeypatch):
    monkeypatch.setattr(sensitivity, "sensitivities", lambda *_: pytest.fail("measured"))
    with pytest.raises(RecipeError, match=said):
        convert(wide, tmp_path / "out", bits, **options)
    assert not (tmp_path / "out").exists()


def test_sizes_are_read():
    sizes = {"90MB": 90_000_000, "1.5 GiB": 3 << 29, "800kb": 800_000, "12345": 12345, ".5GB": 500_000_000}
    assert {text: parse_size(text, "size") for text in sizes} == sizes
    with pytest.raises(RecipeError, match="size = 'ninety' is not a size"):
        parse_size("ninety", "size")


def test_estimates_are_used_again_for_the_same_and_nothing_else(one_block, tmp_path, new_cache, monkeypatch):
    def made(model=one_block, seed=0, **calibration):
        options = {"calibration": CALIBRATION | calibration, "seed": seed, "target_bpw": 6.0, "force": True}
        conversion.convert(str(model), "gguf", "auto", tmp_path / "out", **options)

    made()
    monkeypatch.setattr(sensitivity, "sensitivities", Mock(side_effect=KeyError("measured again")))
    measured = pytest.raises(KeyError, match="measured again")
    made()
    text, name = tmp_path / SAMPLE.name, one_block.name
    text.write_text(SAMPLE.read_text()[3000:])
    for changes in (
        {"model": changed_copy(one_block, tmp_path / "1" / name, lambda t: t["model.norm.weight"].mul_(1.5))},
        {"model": changed_copy(one_block, tmp_path / "2" / name, rms_norm_eps=1e-3)},
        *({"text": str(text)}, {"sequences": 7}, {"length": 31}, {"seed": 1}),
    ):
        with measured:
            made(**changes)
    for module, constant in ((sensitivity, "SEQUENCES"), (mixed_precision, "VERSION")):
        with monkeypatch.context() as patch:
            patch.setattr(module, constant, getattr(module, constant) - 1)
            with measured:
                made()
    [path] = (new_cache / "sensitivity").glob("*.json")
    scores = json.loads(path.read_text())
    name, kinds = scores.popitem()
    for lost in ({}, {name: {**kinds, "Q4_K": float("nan")}}, {name: {k: v for k, v in kinds.items() if k != "Q4_K"}}):
        path.write_text(json.dumps(scores | lost))
        with measured:
            made()
    for broken in ("", "[1]", '{"a": 1}', '{"a": {"Q4_K": "1"}}', '{"a": {"Q4_K": true}}', '{"a": ' * 99_999):
        path.write_text(broken)
        assert sensitivity.read_scores(path) == {}


def test_the_table_of_what_each_block_gets_is_chosen_for(tmp_path, monkeypatch):
    """Gemma 4 E2B and 3n: the most of their weights."""
    take_any_tokenizer(monkeypatch)
    wide = {"hidden_size": 256, "hidden_size_per_layer_input": 64}
    model = save_architecture(tmp_path / "model", "gemma4", changes=wide)
    named = {}
    for bits in (4.5, 7.5):
        artifact = convert(model, tmp_path / str(bits), target_bpw=bits)
        values = yaml.safe_load((artifact.folder / "recipe.yaml").read_text())
        named[bits] = values["options"]["tensor_type"]["per_layer_token_embd.weight"]
        assert types_in(artifact)["per_layer_token_embd.weight"] == named[bits]
    order = TENSOR_TYPES.index
    assert order(named[4.5]) < order(named[7.5])
