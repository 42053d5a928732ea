"""Refusals name what would work, and what is fine here but refused by engines is told; all before any work."""

import pytest
from edits import edit_json
from tiny_llama import calibration, job_for, save_llama
from tiny_models import changed_copy, command_line

from quantkit import convert, verify
from quantkit.contracts.format import Content
from quantkit.contracts.registry import methods
from quantkit.conversion import check as checking
from quantkit.conversion.check import alternatives_to, prepare
from quantkit.errors import QuantkitError, UnsupportedError
from quantkit.records.recipe import ConvertRecipe

SAID = "Methods that take this model: "
DYNAMIC = {"type": "dynamic", "factor": 2.0}


def job_of(folder, method="rtn", bits=None):
    return prepare(ConvertRecipe(model=str(folder), method=method, bits=bits, calibration=calibration()))


def check(folder, method, bits=None):
    """All that a conversion refuses before its work."""
    checking.check(job_of(folder, method, bits), folder.parent / "out")


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_hint_names_exactly_the_methods_whose_checks_pass(name, architecture):
    folder = architecture(name)
    said = alternatives_to(job_of(folder))
    named = dict(pair.split(":") for pair in said.removeprefix(SAID).rstrip(".").split(", ")) if SAID in said else {}
    for name, method in methods().items():
        if method.makes is Content.FLOATS:  # it quantizes nothing
            assert name not in named
        elif name in named:
            check(folder, name, named[name])
        else:
            with pytest.raises(QuantkitError):
                check(folder, name)
    assert bool(named) == (said != "No other method takes this model.")
    [one, *_] = named  # which is not named by its own refusal
    assert f"{one}:" not in alternatives_to(job_of(folder, one), one)


def test_a_refusal_hints_at_no_method_that_refuses_too(tmp_path):
    folder = save_llama(tmp_path / "model", intermediate_size=100)
    with pytest.raises(UnsupportedError, match="100 x 128 weights; 4-bit words need multiples of 8") as refusal:
        check(folder, "gptq")
    _, said, hint = str(refusal.value).partition(SAID)
    for pair in hint.rstrip(".").split(", "):
        check(folder, *pair.split(":"))
    assert "gptq:8" in hint  # bits whose words are filled
    assert str(refusal.value).count(SAID) == 1
    job = job_of(folder, "gptq")
    with pytest.raises(UnsupportedError) as own:
        job.method.check(job)  # the hint is not the methods' own to give
    assert str(refusal.value) == f"{str(own.value).rstrip('.')}. {said}{hint}"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("opt", {}, marks=pytest.mark.slow),
        ("olmo", {"rope_scaling": DYNAMIC}),
        pytest.param("gpt_neo", {}, marks=pytest.mark.slow),
    ],
)
def test_the_methods_that_a_gguf_refusal_names_convert(name, changes, architecture, tmp_path):
    """The refusing process has left torch out, so another one asks the methods."""
    folder = changed_copy(architecture(name), tmp_path / "model", **changes)
    refusal = command_line("convert", folder, "--method", "gguf", "--out", tmp_path / "none").stderr
    _, _, named = refusal.replace("\n", " ").partition(SAID)
    pairs = [pair.split(":") for pair in named.rstrip(". ").split(", ")]
    assert {"rtn", "nf4"} <= {method for method, _ in pairs}, refusal
    assert "gptq" not in dict(pairs) or name == "olmo"  # 512 tokens by default, and 128 positions in a table
    for method, bits in pairs if name == "opt" else [pair for pair in pairs if pair[0] in ("rtn", "gptq")]:
        verify(convert(str(folder), method, bits, tmp_path / method, calibration=calibration()))
    ids = {f"<more{number}>": number for number in range(1000)}
    edit_json(folder / "tokenizer.json", lambda values: values["model"]["vocab"].update(ids))
    refusal = command_line("convert", folder, "--method", "gguf", "--out", tmp_path / "none").stderr
    assert SAID not in refusal  # no method takes such a tokenizer
    assert "add the rows" in refusal


def test_layers_whose_weights_code_reads_past_them_are_refused_by_every_method(architecture):
    folder = architecture("mamba")
    for method in ("gptq", "rtn", "awq", "nf4", "int8", "fp8"):
        with pytest.raises(UnsupportedError, match=r"'mamba' reads .*dt_proj.weight outside its layer"):
            check(folder, method)
    with pytest.raises(UnsupportedError, match="the architecture 'mamba', which has no GGUF conversion"):
        check(folder, "gguf")


def refused_by_vllm(folder, **options):
    return [note for note in job_for(folder, "gptq", **options).notes if "would refuse" in note]


def test_shapes_that_vllm_does_not_take_are_told(tmp_path):
    folder = save_llama(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_attention_heads=8)
    assert refused_by_vllm(folder, group_size=128) == [
        "vLLM would refuse this artifact with tensor parallel size 4 or 8: the 256 columns of "
        "model.layers.0.self_attn.o_proj.weight do not split into 4 parts of whole groups of 128; group_size 64 would"
    ]
    assert refused_by_vllm(folder, group_size=32) == []
    folder = save_llama(tmp_path / "rows", hidden_size=512, intermediate_size=512 + 128, num_attention_heads=8)
    [note] = refused_by_vllm(folder, group_size=32)
    assert "tensor parallel size 8: the 640 rows of model.layers.0.mlp.gate_proj.weight do not split into 8" in note
    [note] = refused_by_vllm(save_llama(tmp_path / "shapes", intermediate_size=80))
    assert note == (
        "vLLM would refuse this artifact: model.layers.0.mlp.gate_proj.weight is 80 x 128, and it needs multiples of 32"
    )


def test_an_architecture_that_no_test_holds_against_transformers_is_taken_and_told(architecture, tmp_path):
    artifact = convert(str(architecture("codegen")), "rtn", out=tmp_path / "out")
    verify(artifact)
    [note] = [note for note in artifact.manifest.notes if "untested" in note]
    assert "'codegen'" in note
    assert not [note for note in job_for(architecture("olmo"), "rtn").notes if "untested" in note]
