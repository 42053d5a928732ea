import pytest
import torch
from gguf_files import slow_but
from tiny_llama import LINEARS, calibration_ids, converted, job_for, plain_model
from trials import dense_values, read_back

from quantkit.numerics.quantized_weight import InputRounding

GROUP = 64
CT = "compressed-tensors"
REFINED = {"refine": True, "refine_steps": 10, "tune_steps": 4}
# Shares of the error that rounding to the nearest code leaves in the logits, in so many bits and symmetric or not.
WAYS = {
    "gptq": ("gptq", "4", {}, 0.13),
    "gptq, zero points": ("gptq", "4", {"sym": False}, 0.13),
    "gptq, activation order": ("gptq", "4", {"desc_act": True}, 0.13),
    "gptq, groups fitted on the way": ("gptq", "4", {"static_groups": False}, 0.15),
    "gptq, not block by block": ("gptq", "4", {"true_sequential": False}, 0.25),
    "gptq, 2 bits": ("gptq", "2", {}, 0.2),
    "gptq, refined": ("gptq", "4", REFINED, 0.13),
    "awq": ("awq", "4", {}, 0.5),
    "awq, symmetric": ("awq", "4", {"sym": True}, 0.5),
    "awq, then gptq": ("awq", "4", {"rounding": "gptq"}, 0.13),
    "awq, then gptq, symmetric": ("awq", "4", {"rounding": "gptq", "sym": True}, 0.13),
    "awq, then gptq, 3 bits": ("awq", "3", {"rounding": "gptq", "format": CT}, 0.13),
    "awq, then gptq, 2 bits": ("awq", "2", {"rounding": "gptq", "sym": True, "format": "gptq"}, 0.2),
    "awq, refined": ("awq", "4", REFINED, 0.45),
    "awq, then gptq, refined": ("awq", "4", {"rounding": "gptq", **REFINED}, 0.13),
}


QUICK = (
    *("gptq, zero points", "gptq, groups fitted on the way", "gptq, 2 bits", "awq", "awq, then gptq, symmetric"),
    *("awq, then gptq, 3 bits", "awq, then gptq, refined"),
)


def logits_of(model, values, ids):
    model.load_state_dict(values, strict=False)
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("way", slow_but(QUICK, WAYS))
def test_outputs_are_nearer_than_those_of_plain_rounding(way, two_blocks, artifact_of, tmp_path):
    method, bits, options, share = WAYS[way]
    ids = calibration_ids(job_for(two_blocks, "gptq"))
    model = plain_model(two_blocks, torch.float32)
    want = logits_of(model, {}, ids)
    symmetric = options.get("sym", method == "gptq")
    plain = artifact_of("rtn", bits, model=two_blocks, group_size=GROUP, sym=symmetric, format=CT)
    made = converted(two_blocks, tmp_path / "made", method, bits, group_size=GROUP, **options)
    errors = [float((logits_of(model, dense_values(each), ids) - want).square().mean()) for each in (made, plain)]
    assert errors[0] < share * errors[1], errors


@pytest.mark.parametrize(("granularity", "block"), [("channel", None), ("block", (128, 128))])
def test_options_reach_the_file_and_a_search_pays(granularity, block, artifact_of, one_block):
    errors = []
    for search in (True, False):
        artifact = artifact_of("fp8", "8", model=one_block, granularity=granularity, scale_search=search)
        assert artifact.manifest.tensor_types == {"float8": 7, "bfloat16": 4}
        for name in LINEARS[:7]:
            layer = read_back(artifact)[name]
            assert layer.block == (block or (1, layer.shape[1]))
            assert layer.inputs == InputRounding("float8", block and block[1])
        errors.append(artifact.manifest.weight_error)
    assert errors[0].mean < 0.99 * errors[1].mean
    assert errors[1].mean < 0.03


@pytest.mark.parametrize("bits", ["3", "nvfp4"])
def test_a_search_of_rtn_pays_in_every_layer(bits, artifact_of, one_block):
    plain, searched = (
        read_back(artifact_of("rtn", bits, model=one_block, format=CT, scale_search=search)) for search in (False, True)
    )
    source = plain_model(one_block, torch.float32).state_dict()
    for name in LINEARS[:7]:
        errors = [(layers[name].dense() - source[name]).square().sum() for layers in (searched, plain)]
        assert errors[0] < 0.97 * errors[1]
