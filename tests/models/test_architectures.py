"""Every promised architecture: its walk, its artifacts and its scalings against the whole model in transformers."""

from dataclasses import replace

import pytest
import torch
from engine_logits import TWO_TEXTS, logits_by, logits_of
from gguf_files import slow_but
from safetensors.torch import load_file, save_file
from tiny_architectures import ARCHITECTURES, LAYERS, save_architecture, whole_model
from tiny_llama import calibration_ids, converted, job_for
from trials import dense, read_back

from quantkit.calibration.moments import FEW_TOKENS
from quantkit.calibration.walk import walk
from quantkit.conversion.verify import verify
from quantkit.formats.source import open_source
from quantkit.models.skeleton import open_skeleton
from quantkit.numerics import matmul as products
from quantkit.numerics.quantized_weight import GroupedWeight

# Those that stand for the others in the quick lane.
REPRESENTATIVE = {
    "llama", "llama, tied", "phi3", "gpt2", "gpt_neox", "opt", "mixtral", "qwen2_moe", "deepseek_v3", "llama4",
    "gpt_oss", "qwen3_next", "gemma4",
}  # fmt: skip
each_architecture = pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, ARCHITECTURES))
# Those that are converted by GPTQ and by AWQ; the others by both at once.
APART = list(ARCHITECTURES)[: list(ARCHITECTURES).index("mixtral")]


@each_architecture
def test_block_inputs_are_the_hidden_states_of_the_whole_model(name, architecture, monkeypatch):
    has_units = products._has_units(torch.bfloat16)
    # Bit for bit, so both multiply by torch alone, on every processor: not all of its layers are nn.Linear there.
    monkeypatch.setattr(products, "_has_units", lambda _dtype: True)
    trial = job_for(architecture(name), "gptq")
    ids = calibration_ids(trial)
    with torch.no_grad():
        model = whole_model(architecture(name), torch.bfloat16)
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
    # A Conv1D holds its weight transposed: without units torch sums its products in another order.
    transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())
    # So does it of experts that are stacked transposed.
    stacked = any(getattr(module, "is_transposed", False) for module in model.modules()) or "llama4" in name
    tolerance = 2**-6 if stacked or (transposed and not has_units) else 0
    seen = 0
    for block in walk(trial.job, trial.run):
        want = states[block.index].float()
        far = (block.inputs.read().float() - want).abs() > tolerance * want.abs().max()
        assert far.any(-1).float().mean() <= (0.02 if stacked else 0)  # a token may be sent to another expert
        seen += 1
    assert seen == len(states) - 1


def in_transformers(artifact, source, folder):
    """The whole model of transformers of our reader's values; GPT-2's layers are turned, some experts stacked there."""
    values, stored = {}, load_file(source / "model.safetensors")
    for name, value in read_back(artifact).items():
        plain = dense(value).float()
        values[name] = (plain.T if isinstance(value, GroupedWeight) and "gpt2" in source.name else plain).contiguous()
    values = stacked(values, stored, source)
    folder.mkdir()
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    assert set(values) == set(stored)
    return whole_model(folder)


def stacked(values, stored, source):
    """The values with those that are no tensor of the checkpoint put into the stack that they were cut out of."""
    stacks = {}
    for name, origin in open_skeleton(open_source(str(source)).config).origins.items():
        if name in stored or origin.expert is None:
            continue
        stack = stacks.setdefault(
            origin.name if origin.name in stored else origin.also, torch.full(origin.shape, torch.nan)
        )
        mine = stack[origin.expert].T if origin.transposed else stack[origin.expert]
        mine[slice(*origin.rows)] = values.pop(name)
    assert not any(bool(stack.isnan().any()) for stack in stacks.values())
    return values | stacks


def proven(artifact, source, folder, linears):
    """The artifact verifies, holds the right number of codes, and its logits in `reference` are transformers' own."""
    verify(artifact)
    assert artifact.manifest.tensor_types["int4"] == round(LAYERS * linears)
    want = logits_of(in_transformers(artifact, source, folder), TWO_TEXTS)
    got = logits_by("reference", artifact, TWO_TEXTS, dtype="float32")
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@each_architecture
def test_artifacts_are_read_back_and_computed_as_transformers_does(name, architecture, tmp_path):
    apart, source = name in APART, architecture(name)
    how = "nearest" if apart else "gptq"  # with error feedback the way through a block is GPTQ's, too
    made = {"awq": converted(source, tmp_path / "awq", "awq", group_size=32, n_grid=2, rounding=how)}
    if apart:
        made["gptq"] = converted(source, tmp_path / "gptq", "gptq", group_size=32)
        assert made["gptq"].manifest.weight_error is not None
        assert made["gptq"].manifest.weight_error.worst < 0.5
    for method, artifact in made.items():
        proven(artifact, source, tmp_path / f"{method}-plain", ARCHITECTURES[name].linears)


def routed(folder, ids):
    """By block what stacked experts are given (tokens, K), of llama4 each its own, and for each who is sent to it."""
    seen = {}
    model = whole_model(folder, torch.bfloat16)

    def note(index):
        def hook(stack, args):
            count = len(stack.down_proj)
            if len(args) == 1:
                sent = args[0].reshape(count, -1, args[0].shape[-1])
                seen[index] = sent.float(), [one.any(-1) for one in sent]
            else:
                seen[index] = args[0].float(), [(args[1] == expert).any(-1) for expert in range(count)]

        return hook

    for index, layer in enumerate(model.model.layers):
        for module in layer.modules():
            if getattr(getattr(module, "down_proj", None), "ndim", 0) == 3:
                module.register_forward_pre_hook(note(index))
    with torch.no_grad():
        model(input_ids=ids)
    return seen


def mixtures():
    """The architectures with stacked experts, which all their blocks have but the first ones."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    dense = ("qwen2_moe, last block dense", "qwen3_moe, first block dense")
    return [name for name, tiny in ARCHITECTURES.items() if set(counts) & tiny.settings.keys() and name not in dense]


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, mixtures()))
def test_an_expert_is_calibrated_with_the_tokens_routed_to_it(name, architecture):
    trial = job_for(architecture(name), "gptq")
    choices = routed(architecture(name), calibration_ids(trial))
    first_block = min(choices)
    blocks = walk(trial.job, trial.run)
    block = next(block for block in blocks if block.index == first_block)
    inputs, sent = choices[first_block]
    hessians = block.hessians(block.groups())
    first = [key for key in hessians if ".experts." in key and not key.endswith(("down_proj.weight", "w2.weight"))]
    assert len(first) == len(sent) == 4
    alone = 0
    for index, (key, mine) in enumerate(zip(first, sent, strict=True)):
        x = inputs[mine] if inputs.ndim == 2 else inputs[index][mine]
        assert block.moments.tokens[key] == len(x)
        assert f".experts.{index}." in key
        if len(x) >= FEW_TOKENS:
            assert (hessians[key] - x.T @ x / len(x)).norm() < 5e-3 * hessians[key].norm()
            alone += 1
    assert alone >= 2


def seldom(model):
    """One expert for each token: 0 and 1 for half of them each, 3 for few, 2 for none."""
    model.config.num_experts_per_tok = 1
    for layer in model.model.layers:
        layer.mlp.gate.weight.zero_()
        layer.mlp.gate.weight[:2, 0] = torch.tensor([1.0, -1.0])
        layer.mlp.gate.weight[3, 1] = 0.05


@pytest.mark.parametrize("offload_bytes", [0, 1 << 31])
def test_experts_that_saw_too_few_tokens_share_what_all_saw(offload_bytes, tmp_path):
    folder = save_architecture(tmp_path / "model", "mixtral", change=seldom)
    trial = job_for(folder, "gptq", tmp_path)
    x, sent = routed(folder, calibration_ids(trial))[0]
    counts = [int(mine.sum()) for mine in sent]
    assert counts[2] == 0 < counts[3] < FEW_TOKENS < min(counts[:2])
    blocks = walk(replace(trial.job, offload_bytes=offload_bytes), trial.run)
    block = next(blocks)
    seen = {}
    block.for_each_group(lambda group: seen.update(dict.fromkeys(group.names, group)))
    stem = "model.layers.0.block_sparse_moe.experts"
    flat = x.reshape(-1, x.shape[-1])
    everything = flat.T @ flat / len(flat)
    for index in range(len(counts)):
        group = seen[f"{stem}.{index}.w1.weight"]
        assert group is seen[f"{stem}.{index}.w3.weight"]
        shared = (group.hessian - everything).norm() < 5e-3 * everything.norm()
        assert bool(shared) == (index >= 2)
    down = [seen[f"{stem}.{index}.w2.weight"] for index in range(4)]
    assert torch.equal(down[2].hessian, down[3].hessian)
    mean = sum(group.hessian * count for group, count in zip(down, counts[:2], strict=False)) / sum(counts[:2])
    assert (down[2].hessian - mean).norm() < 0.2 * mean.norm()
    assert [note for note in trial.notes if "experts" in note] == [
        "2 of 12 experts saw fewer than 128 calibration tokens; they are calibrated on the inputs of all experts of "
        "their block. Give more or more varied text"
    ]


def test_a_stacked_checkpoint_gives_what_one_of_single_experts_gives(tmp_path):
    single, stacked = tmp_path / "single", tmp_path / "stacked"
    save_architecture(single, "mixtral", changes={"num_hidden_layers": 1})
    save_architecture(stacked, "mixtral", changes={"num_hidden_layers": 1}, save_original_format=False)
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in load_file(stacked / "model.safetensors"))
    made = [converted(folder, folder / "out", "gptq", group_size=32) for folder in (single, stacked)]
    ours, theirs = (load_file(artifact.folder / "model.safetensors") for artifact in made)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert made[0].manifest.weight_error == made[1].manifest.weight_error
