"""A source over another passes every hook of the contract on, but for what it changes."""

import torch
from tiny_adapters import low_rank, save_adapter
from tiny_models import changed_copy, prepare_job

from quantkit import convert
from quantkit.checkpoints.safetensors import TensorInfo
from quantkit.conversion.check import check
from quantkit.formats._quantized_checkpoint import QuantizedCheckpoint
from quantkit.formats.float import Checkpoint
from quantkit.formats.gguf.checkpoint import GgufCheckpoint
from quantkit.formats.source import open_source
from quantkit.models.adapted import AdaptedSource
from quantkit.models.source import OverriddenSource, Override, Source

KINDS = (Checkpoint, QuantizedCheckpoint, GgufCheckpoint, AdaptedSource)


def hooks():
    """Whatever a kind of source says otherwise than `Source` does."""
    return {name for kind in KINDS for name in vars(kind) if name[0] != "_" and hasattr(Source, name)}


def probe():
    """A source that answers each hook with an object of its own."""

    def answering(answer):
        return lambda *_: answer

    body = {
        name: answering(object()) if callable(getattr(Source, name)) else property(answering((object(),)))
        for name in hooks()
    }
    source = type("Probe", (Source,), body)()
    for name in ("folder", "model", "revision", "adapters", "config", "whole_config", "text_prefixes"):
        setattr(source, name, object())
    source.tensors = {"a": TensorInfo("", "F32", (1,), 0, 4)}
    return source


def test_every_hook_is_passed_on():
    base = probe()
    wrapper = OverriddenSource(base)
    for hook in hooks():
        wrapped, given = getattr(wrapper, hook), getattr(base, hook)
        if callable(given):
            arguments = {"read_rows": ("a", 0, 1), "tokenizer": (), "side_files": ()}.get(hook, ("a",))
            wrapped = wrapped(*arguments)
            given = None if hook == "copy_side_files" else given(*arguments)
        assert wrapped == given, hook
    assert (wrapper.config, wrapper.tensors) == (base.config, base.tensors)
    changed = OverriddenSource(base, {"a": Override(base.tensors["a"], lambda start, stop: torch.ones(1).numpy())})
    assert (changed.format, changed.own_files, changed.origin) == ("float", False, changed)  # its values are in no file
    assert changed.tensor("a") == 1


def test_codes_are_told_through_the_wrapper(one_block, tmp_path):
    path, other = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj.weight"
    beside = {"mtp.norm.weight": torch.ones(4)}
    model = changed_copy(one_block, tmp_path / "model", lambda tensors: tensors.update(beside))
    quantized = convert(str(model), "rtn", out=tmp_path / "rtn", format="gptq").folder
    adapter = save_adapter(tmp_path / "adapter", low_rank(one_block, [path]), target_modules=["q_proj"])
    base, source = (open_source(str(quantized), None, adapters) for adapters in ((), (adapter,)))
    assert isinstance(source, AdaptedSource)
    for one in (base, source):
        assert one.is_dequantized(f"{path}.weight")
        assert not one.is_dequantized("model.norm.weight")
        assert one.reading_bytes("model.norm.weight") == 0
    values = base.tensors[f"{path}.weight"].parameters
    assert base.reading_bytes(f"{path}.weight") == 17 * values
    assert source.reading_bytes(f"{path}.weight") == 25 * values
    assert source.reading_bytes(other) == 17 * base.tensors[other].parameters
    job = check(prepare_job(str(quantized), "rtn", format="gptq", adapters=[adapter]), tmp_path / "out").job
    assert list(job.source.passthrough) == ["mtp.norm.weight"]
