"""Models whose blocks need more than what the block before gave: every method gives what transformers computes."""

import json
from dataclasses import replace

import pytest
import torch
from engine_logits import TWO_TEXTS, logits_by, logits_of
from gguf_files import slow_but
from safetensors.torch import load_file
from tiny_architectures import whole_model
from tiny_llama import LENGTH, calibration_ids, converted, job_for
from tiny_models import changed_copy
from trials import dense, read_back

from quantkit.calibration.walk import walk
from quantkit.conversion.verify import verify

KINDS = ["gemma3n", "gemma4"]
LEARNED = {"group_size": 32, "refine": True, "refine_steps": 3, "tune_steps": 2}
QUICK = [
    ("gemma4", "int8", "8", {}), ("gemma4", "rtn", "4", {}), ("gemma3n", "nf4", "4", {}),
    ("gemma3n", "float", "float32", {}), ("gemma4", "gptq", "4", LEARNED),
]  # fmt: skip
SLOW = [
    ("gemma4", "fp8", "8", {}), ("gemma3n", "fp8", "8", {}), ("gemma3n", "int8", "8", {}), ("gemma3n", "rtn", "4", {}),
    ("gemma4", "awq", "4", LEARNED), ("gemma3n", "gptq", "4", LEARNED), ("gemma3n", "awq", "4", LEARNED),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "method", "bits", "options"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_methods_give_what_transformers_computes(name, method, bits, options, architecture, tmp_path):
    """Our reader, as the whole model, and transformers with the values that are read back."""
    made = converted(architecture(name), tmp_path / "out", method, bits, **options)
    theirs = whole_model(architecture(name))
    before = logits_of(theirs, TWO_TEXTS)
    values = {key: dense(value).float() for key, value in read_back(made).items()}
    assert not theirs.load_state_dict(values, strict=False).unexpected_keys
    theirs.tie_weights()
    want = logits_of(theirs, TWO_TEXTS)
    got = logits_by("reference", made, TWO_TEXTS, dtype="float32")
    tolerance = {"fp8": 0.3, "int8": 0.3}.get(method, 1e-4)  # our reader rounds inputs, too, as engines do
    assert (got - want).square().mean().sqrt() < tolerance * want.std()
    far = 1.0 if bits == "4" else 0.5 if method == "fp8" else 0.1
    assert (want - before).square().mean().sqrt() < far * before.std()


@pytest.mark.parametrize("name", slow_but(["gemma4"], KINDS))
def test_each_batch_is_given_what_is_of_its_texts(name, architecture):
    trial = job_for(architecture(name), "gptq")
    with torch.no_grad():
        model = whole_model(architecture(name), torch.bfloat16)
        states = model(input_ids=calibration_ids(trial), output_hidden_states=True).hidden_states
    for block in walk(replace(trial.job, batch_tokens=3 * LENGTH), trial.run):
        want = states[block.index].float()
        assert (block.inputs.read().float() - want).abs().max() < 2**-6 * want.abs().max()


@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_an_earlier_run_share_what_they_shared(name, architecture, tmp_path):
    """They are passed through with the values that they had come to."""
    trial = job_for(architecture(name), "gptq", tmp_path)
    finished = {}
    states = []

    def coarser(block):
        for key, layer in block.linears.items():
            block.replace(key, (layer.weight.float() * 8).round() / 8)
        return block.inputs.read().clone()

    for block in walk(trial.job, trial.run, exact=0.5):
        states.append(coarser(block))
        parameters = block.module.named_parameters()
        finished[block.index] = {block.prefix + key: value.detach().clone() for key, value in parameters}
    again = walk(trial.job, trial.run, exact=0.5, restore=lambda index, _: finished[index] if index < 2 else None)
    got = [coarser(block) for block in again]
    assert len(got) == 2
    assert all(map(torch.equal, got, states[2:]))


def test_keys_and_values_of_blocks_that_take_those_of_others(architecture, tmp_path):
    """Published checkpoints have them, and transformers leaves them out; engines join them to quantized queries."""
    unused = {f"model.layers.3.self_attn.{name}_proj.weight": torch.ones(64, 64).bfloat16() for name in "kv"}
    folder = changed_copy(architecture("gemma4"), tmp_path / "model", lambda tensors: tensors.update(unused))
    floats = converted(folder, tmp_path / "floats", "float", "float32")
    assert set(floats.manifest.source.kept) == set(unused)
    made = converted(folder, tmp_path / "out", "gptq", "4", format="compressed-tensors")
    assert not set(unused) & set(load_file(made.folder / "model.safetensors"))
    [note] = [note for note in made.manifest.notes if "are outside its architecture" in note]
    assert note.startswith("2 tensors of the source (8,192 values)")
    assert "are left out: their blocks reuse other blocks" in note
    ignored = json.loads((made.folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert not [rule for rule in ignored if ".3." in rule]
    verify(made)
