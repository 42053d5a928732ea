"""What wraps a source passes every hook of the contract on, but for what it changes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_padded import add_tokens
from tiny_adapters import low_rank, save_adapter
from tiny_models import save_tiny

from quantkit import convert
from quantkit.conversion.check import check, prepare_job
from quantkit.formats._changed.adapted import AdaptedSource
from quantkit.formats._changed.changed import ChangedSource
from quantkit.formats._changed.padded import PaddedSource
from quantkit.formats.float.checkpoint import Checkpoint
from quantkit.formats.gguf.checkpoint import GgufCheckpoint
from quantkit.formats.quantized_checkpoint import QuantizedCheckpoint
from quantkit.formats.source import open_source
from quantkit.models.source import Source

BASES, WRAPPERS = (Checkpoint, QuantizedCheckpoint, GgufCheckpoint), (ChangedSource, AdaptedSource, PaddedSource)
NOT_PASSED_ON = {"format", "own_files"}  # its values lie in no file


def hooks() -> set[str]:
    """Whatever a kind of source says otherwise than `Source` does."""
    return {name for kind in (*BASES, *WRAPPERS) for name in vars(kind) if name[0] != "_" and hasattr(Source, name)}


def probe() -> Source:
    """A source that answers each hook with an object of its own."""
    answers = {name: object() for name in hooks() if not callable(getattr(Source, name))}
    calls = {name: object() for name in hooks() if callable(getattr(Source, name))}

    def answering(answer: object) -> object:
        return lambda *_: answer

    body = {name: property(answering(answer)) for name, answer in answers.items()}
    body |= {name: answering(answer) for name, answer in calls.items()}
    source = type("Probe", (Source,), body)()
    for name in ("folder", "model", "config", "tensors"):
        setattr(source, name, object())
    return source


@pytest.mark.parametrize("hook", sorted(hooks() - NOT_PASSED_ON))
def test_a_hook_is_passed_on(hook: str) -> None:
    base = probe()
    wrapped, given = getattr(ChangedSource(base), hook), getattr(base, hook)
    if callable(given):
        arguments = {"read_rows": ("a", 0, 1), "tokenizer": (), "side_files": ()}.get(hook, ("a",))
        if hook == "copy_side_files":
            assert wrapped(*arguments) is None
            return
        wrapped, given = wrapped(*arguments), given(*arguments)
    assert wrapped is given


def test_what_it_has_instead_of_hooks_is_the_bases() -> None:
    base = probe()
    base.kept, base._aside, base._whole, base.revision = {"a": "b"}, {}, {}, "main"
    wrapped = ChangedSource(base)
    for name in ("folder", "model", "revision", "config", "tensors", "places", "kept", "_aside", "_whole"):
        assert getattr(wrapped, name) is getattr(base, name)
    assert not wrapped.own_files


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPTQ codes, a tensor beside the model, and two tokens without a row."""
    place = tmp_path_factory.mktemp("models")
    model = add_tokens(save_tiny(place / "model"))
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"mtp.norm.weight": torch.ones(4)}, model / "model.safetensors", {"format": "pt"})
    return convert(str(model), "rtn", out=place / "rtn", format="gptq").folder


def test_codes_are_told_through_both_wrappers(quantized: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    plain = save_tiny(tmp_path / "plain")
    adapter = save_adapter(tmp_path / "adapter", low_rank(plain, [name]), target_modules=["q_proj"])
    base, source = (open_source(str(quantized), None, adapters, True) for adapters in ((), (adapter,)))
    assert isinstance(source, PaddedSource)
    assert source.padded_rows == base.padded_rows == 2
    for one in (base, source):
        assert not one.reads_as_stored(f"{name}.weight")
        assert one.reads_as_stored("model.norm.weight")
        assert one.reading_bytes("model.norm.weight") == 0
    values = base.tensors[f"{name}.weight"].parameters
    other = "model.layers.0.self_attn.k_proj.weight"
    assert base.reading_bytes(f"{name}.weight") == 17 * values
    assert source.reading_bytes(f"{name}.weight") == 25 * values
    assert source.reading_bytes(other) == 17 * base.tensors[other].parameters


def test_a_tensor_beside_a_padded_quantized_model_is_kept(quantized: Path, tmp_path: Path) -> None:
    job = check(prepare_job(str(quantized), "rtn", format="gptq", pad_vocab=True), tmp_path / "out").job
    assert list(job.source.kept) == ["mtp.norm.weight"]
