import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_llama
import torch
from tiny_llama import LAYERS, LENGTH, LINEARS, SEQUENCES, calibration_ids, inputs_of, job_for, plain_model, save_llama

from quantkit.calibration import walk as walk_module
from quantkit.calibration.activations import Activations
from quantkit.calibration.block import Block
from quantkit.calibration.scale_tuning import Tuning, tune
from quantkit.calibration.sensitivity import sensitivities
from quantkit.calibration.walk import batch_size, measure_importance, walk
from quantkit.errors import SourceError

# Products of bfloat16 inputs are rounded to bfloat16 once a chunk; the sums are float32.
ROUNDING = 2**-8
SHORT = 16


def test_hessians_and_importance_equal_those_of_plain_hooks(tiny_with):
    folder = tiny_with(num_hidden_layers=2, attention_bias=True, mlp_bias=True)
    trial = job_for(folder, "gptq")
    seen = inputs_of(plain_model(folder), LINEARS[:14], calibration_ids(trial))
    hessians, modules = {}, []
    for block in walk(trial.job, trial.run):
        hessians |= block.hessians(block.groups())
        modules.append(block.module)
    assert {parameter.device.type for module in modules for parameter in module.parameters()} == {"meta"}  # let go of
    assert len(hessians) == 2 * 4
    for name, ours in hessians.items():
        theirs = seen[name].T @ seen[name] / len(seen[name])
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < ROUNDING * theirs.norm()
    importance = measure_importance(trial.job, trial.run)
    assert set(importance) == set(LINEARS[:14])
    for name, x in seen.items():
        assert importance[name].dtype == np.float32
        assert np.allclose(importance[name], x.square().mean(0), rtol=1e-5)


def tuned(trial):
    return tune(trial.job, trial.run, lambda _prefix: {}, Tuning(1), Activations(SEQUENCES, LENGTH, tiny_llama.HIDDEN))


WORK = {
    "walk": lambda trial: list(walk(trial.job, trial.run)),
    "sensitivities": lambda trial: sensitivities(trial.job, trial.run, lambda _name: None),
    "tuning": tuned,
}


# The norm behind the blocks is read first, then nine tensors a block; the passes back begin at 30 and at 57.
@pytest.mark.parametrize(("work", "reads"), [("walk", 0), ("walk", 6), ("sensitivities", 34), ("tuning", 61)])
def test_a_source_that_breaks_leaves_a_skeleton_without_weights(work, reads, tiny_llama, tmp_path, monkeypatch):
    trial = job_for(tiny_llama, "gptq", tmp_path)
    read, done = trial.source.tensor, itertools.count()

    def breaking(name):
        if next(done) >= reads:
            raise OSError("the disk is gone")
        return read(name)

    monkeypatch.setattr(trial.source, "tensor", breaking)
    with pytest.raises(OSError, match="the disk is gone"):
        WORK[work](trial)
    skeleton = trial.job.skeleton
    assert {type(block).__name__ for block in skeleton.blocks} == {"LlamaDecoderLayer"}
    assert {parameter.device.type for parameter in skeleton.model.parameters()} == {"meta"}
    assert skeleton.model.lm_head.weight is skeleton.model.model.embed_tokens.weight


def test_a_model_that_overflows_is_named(tmp_path):
    trial = job_for(save_llama(tmp_path / "loud", num_hidden_layers=1), "gptq")
    blocks = walk(trial.job, trial.run)
    block = next(blocks)
    block.replace("model.layers.0.mlp.up_proj.weight", torch.full((256, 128), 3e38))
    with pytest.raises(SourceError, match=r"the inputs of model\.layers\.0\.mlp\.down_proj\.weight are not finite"):
        block.hessians(block.groups())


def test_a_share_of_the_sequences_and_every_second_token(tiny_llama, monkeypatch):
    monkeypatch.setattr(walk_module, "BATCH_TOKENS", 4 * LENGTH)
    trial = job_for(tiny_llama, "gptq")
    monkeypatch.setattr(walk_module, "LEAST_TOKENS", 0)
    exact_count = walk_module.exact_sequences(0.3, SEQUENCES, LENGTH, 256)
    assert exact_count == 8  # in whole batches of four
    ids, model, exact = calibration_ids(trial), plain_model(tiny_llama), plain_model(tiny_llama)
    groups = {}
    # 16 * 64 tokens: twice 4 a column of o_proj, not of the wider down_proj. Six do not divide the eight exact ones.
    job = replace(trial.job, batch_tokens=6 * LENGTH)
    blocks = walk(job, trial.run, exact=0.3, ample=4)
    block = next(blocks)
    assert block.batches() == [(0, 6), (6, 8), (8, 14), (14, 16)]

    def see(group):
        groups[group.names[0]] = group
        for name in group.names:
            block.replace(name, (block.linears[name].weight.float() * 16).round() / 16)

    block.for_each_group(see)
    steps = {"model.layers.0.self_attn.o_proj.weight": 2, "model.layers.0.mlp.down_proj.weight": 1}
    for name in LINEARS[:7]:
        weight = model.get_parameter(name).detach()
        if name in steps:
            x, y = (inputs_of(m, [name], ids)[name][:: steps[name]] for m in (model, exact))
            n, group = exact_count * LENGTH // steps[name], groups[name]
            for got, want in (
                (group.hessian, x.T @ x / len(x)),
                (group.paired, x[:n].T @ x[:n] / n),
                (group.cross, (y - x)[:n].T @ x[:n] / n),
            ):
                assert (got - want).norm() <= 2 * ROUNDING * want.norm()
        weight.copy_((weight.float() * 16).round() / 16)


def test_the_unquantized_stream_is_long_enough_for_the_widest_layer():
    share = walk_module.exact_sequences
    assert share(0.0, 128, 512, 1536) == 0
    assert share(0.125, 128, 512, 4096) == 40  # 5 * 4096 / 512
    assert share(0.125, 17, 512, 1536) == 16  # whole batches
    assert share(0.125, 16, 512, 11008) == 16  # all there are
    assert share(1.0, 17, 512, 64) == 17


@pytest.mark.parametrize(("factor", "finished"), [(0.7, LAYERS), (-1.5, 1)])
def test_a_model_is_unusable_where_zeros_would_be_nearer(tiny_llama, factor, finished, monkeypatch):
    """What blocks add is multiplied; an earlier run had finished some of them."""
    trial, model = job_for(tiny_llama, "gptq"), plain_model(tiny_llama)
    states = []
    model.model.norm.register_forward_pre_hook(lambda _m, args: states.append(args[0].float()))
    outer = ("o_proj.weight", "down_proj.weight")
    adding = {name: value.detach() * factor for name, value in model.named_parameters() if name.endswith(outer)}
    ids = calibration_ids(trial)[: batch_size(LENGTH)]
    with torch.no_grad():
        for changed in ({}, adding):
            torch.func.functional_call(model, changed, kwargs={"input_ids": ids})
    distance = float(((states[1] - states[0]).square().sum(-1) / states[0].square().sum(-1)).mean())
    assert (distance > 1.5) if factor < 0 else (0.05 < distance < 0.7)
    seen = []
    measure = Block.distance
    monkeypatch.setattr(Block, "distance", lambda *given: seen.append(measure(*given)) or seen[-1])

    def within(prefix):
        return {name: value for name, value in adding.items() if name.startswith(prefix)}

    def restore(index, prefix):
        return within(prefix) if index < finished else None

    for block in walk(trial.job, trial.run, exact=0.25, restore=restore):
        for name, value in within(block.prefix).items():
            block.replace(name, value)
    assert seen == [pytest.approx(distance, rel=0.02)]
    assert any("unusable" in note for note in trial.run.findings.notes) == (factor < 0)


def repeated(block, visitor):
    """`for_each_group` by running the blocks from their inputs for each group, every time anew."""
    streams = [block.stream] if block.exact is None else [block.stream, block.exact]
    with torch.no_grad():
        for names in block.groups():
            gram = block.moments.empty(names[0], len(streams) > 1)
            for start, stop in block.batches():
                seen = []
                for stream in streams:
                    layer = stream.module.get_submodule(names[0].removeprefix(block.prefix).removesuffix(".weight"))
                    with layer.register_forward_pre_hook(lambda _, args, to=seen: to.append(args[0])):
                        stream.call(range(start, stop)) if stop <= len(stream.states) else None
                block._add(gram, names[0], *([SimpleNamespace(at=0, x=x) for x in seen] + [None])[:2], 0)
            visitor(block.moments.group(names, gram, block.collect))
        block.stream.finish(block.batches(), block.trimmer)


def walked(folder, out, suspend, offload_bytes, exact, ample):
    """All that a walk gives, while each weight is replaced by a coarser one once its group is seen."""
    trial, seen = job_for(folder, "gptq", out, length=SHORT), []
    job = replace(trial.job, offload_bytes=offload_bytes, batch_tokens=4 * SHORT)
    for block in walk(job, trial.run, exact=exact, ample=ample):
        seen.append(block.inputs.read().clone())

        def see(group, block=block):
            seen.extend(x.clone() for x in (group.hessian, group.cross, group.paired) if x is not None)
            for name in group.names:
                block.replace(name, (block.linears[name].weight.float() * 16).round() / 16)

        block.for_each_group(see) if suspend else repeated(block, see)
        seen.append(block.inputs.read().clone())
        if exact:
            seen.append(block.targets().read().clone())
    assert not [path for path in out.iterdir() if path.suffix == ".offload"]
    return seen


@pytest.mark.parametrize(
    ("name", "exact", "offload_bytes"),
    [("llama", 0.3, 0), ("mixtral", 1.0, 1 << 16), ("gemma4", 0.3, 1 << 31), ("gemma3n", 0.0, 0)],
)
def test_suspended_batches_equal_batches_that_run_the_block_again(
    name, exact, offload_bytes, architecture, tmp_path, monkeypatch
):
    """Bit for bit: the same operations on the same batches with the same weights, in one thread."""
    monkeypatch.setattr(walk_module, "BATCH_TOKENS", 4 * SHORT)
    monkeypatch.setattr(walk_module, "LEAST_TOKENS", 0)
    want, got = (walked(architecture(name), tmp_path, suspend, offload_bytes, exact, 4) for suspend in (False, True))
    assert len(got) == len(want) > 9
    assert any(bool(x.any()) for x in want[1:])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))
