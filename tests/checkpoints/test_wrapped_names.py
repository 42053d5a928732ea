"""Names that torch.compile, DistributedDataParallel, FSDP and peft leave in checkpoints (peft#2957)."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import low_rank, save_adapter
from tiny_models import changed_copy
from transformers import AutoModelForCausalLM
from trials import dense_values

from quantkit.checkpoints.safetensors import unwrapped
from quantkit.conversion.convert import convert
from quantkit.errors import UnsupportedError
from quantkit.formats.float import SINGLE as WHOLE
from quantkit.formats.source import open_source
from quantkit.models.adapter import WEIGHTS, open_adapter


@pytest.mark.parametrize(
    ("stored", "plain"),
    [
        (["_orig_mod.a.b", "_orig_mod.c"], ["a.b", "c"]),
        (["module._orig_mod.a", "module._orig_mod.b"], ["a", "b"]),
        (["_orig_mod.module.module.a"], ["a"]),
        (["base_model.model.model.a", "base_model.model.b"], ["model.a", "b"]),
        (["model._orig_mod.layers.0._checkpoint_wrapped_module.a", "b"], ["model.layers.0.a", "b"]),
        (["_fsdp_wrapped_module.a"], ["a"]),
        (["module.a", "b"], ["module.a", "b"]),  # an own part of that name
        (["a_orig_mod.b", "submodule.c"], ["a_orig_mod.b", "submodule.c"]),
        (["_orig_mod.a", "a"], ["_orig_mod.a", "a"]),  # two tensors, whose names are not told apart
        ([], []),
    ],
)
def test_what_is_cut(stored, plain):
    assert unwrapped(dict.fromkeys(stored, 1)) == dict.fromkeys(plain, 1)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_a_wrapped_checkpoint_is_the_one_inside(prefix, tiny, tmp_path):
    def wrap(tensors):
        named = {prefix + name: tensors.pop(name) for name in list(tensors)}
        tensors.update(named)

    wrapped = changed_copy(tiny, tmp_path / "wrapped", wrap)
    one, other = (convert(str(model), "rtn", out=tmp_path / f"of-{model.name}") for model in (wrapped, tiny))
    assert any(f"{prefix}model.embed_tokens.weight is read as model." in note for note in one.manifest.notes)
    assert not any("is read as" in note for note in other.manifest.notes)
    assert (one.folder / WHOLE).read_bytes() == (other.folder / WHOLE).read_bytes()
    assert not open_source(str(wrapped)).own_files


@pytest.mark.parametrize(("method", "bits"), [("rtn", "4"), ("gguf", "Q8_0"), ("ctranslate2", "int8")])
def test_a_tied_matrix_that_is_stored_as_the_head_alone_is_the_embedding(method, bits, tiny, tmp_path):
    """As transformers reads it."""
    table = "model.embed_tokens.weight"
    tied = changed_copy(tiny, tmp_path / "tied", lambda t: t.pop("lm_head.weight", None), tie_word_embeddings=True)
    head = changed_copy(tied, tmp_path / "head", lambda tensors: tensors.update({"lm_head.weight": tensors.pop(table)}))
    one, other = (convert(str(model), method, bits, tmp_path / f"of-{model.name}") for model in (head, tied))
    assert f"lm_head.weight is read as {table}" in str(one.manifest.notes)
    for file in other.manifest.weight_files:
        if method != "gguf":  # which has the model's name among its keys
            assert (one.folder / file).read_bytes() == (other.folder / file).read_bytes()
    assert dense_values(one).keys() == dense_values(other).keys()
    assert all(torch.equal(value, dense_values(other)[name]) for name, value in dense_values(one).items())
    theirs = AutoModelForCausalLM.from_pretrained(head)
    assert torch.equal(theirs.get_input_embeddings().weight, load_file(tied / WHOLE)[table].float())


def test_an_untied_head_without_an_embedding_is_refused(tiny, tmp_path):
    changes = {"tie_word_embeddings": False}
    folder = changed_copy(tiny, tmp_path / "model", lambda tensors: tensors.pop("model.embed_tokens.weight"), **changes)
    with pytest.raises(UnsupportedError, match=r"has no tensor model\.embed_tokens\.weight"):
        convert(str(folder), "rtn", out=tmp_path / "out")


@pytest.mark.parametrize(("before", "inside"), [("", "_orig_mod."), ("module.", ""), ("_orig_mod.", "")])
def test_a_wrapped_adapter_is_the_one_inside(before, inside, tiny, tmp_path):
    path = "model.layers.0.self_attn.q_proj"
    adapter = save_adapter(tmp_path / "adapter", low_rank(tiny, [path]))
    named = {
        before + name.replace("layers", inside + "layers"): value
        for name, value in load_file(adapter / WEIGHTS).items()
    }
    save_file(named, adapter / WEIGHTS)
    assert list(open_adapter(adapter).updates) == [path]
    assert any("wrapper's prefix" in note for note in open_source(str(tiny), adapters=[adapter]).notes)
