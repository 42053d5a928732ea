"""Models whose blocks need more than what the block before gave: every method gives what transformers computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_logits import engine_logits
from safetensors.torch import load_file, save_file
from tiny_architectures import whole_model
from tiny_llama import LENGTH, calibration_ids, converted, job_for
from trials import dense, read_back

from quantkit.calibration import block as block_module
from quantkit.calibration.block import Block
from quantkit.calibration.flow.shared import Shared, Shelf
from quantkit.calibration.passes import SourceValues, embed
from quantkit.calibration.walk import walk
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.conversion.verify import verify
from quantkit.errors import UnsupportedError
from quantkit.formats.source import open_source
from quantkit.models.skeleton import open_skeleton

KINDS = ["gemma3n", "gemma4"]
IDS = torch.arange(40).reshape(2, 20) * 7 % 300
PLACE = "shared_kv_states"


def mostly_slow(quick: list[tuple[str, ...]], slow: list[tuple[str, ...]]) -> list[Any]:
    return [*quick, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]


one_is_slow = pytest.mark.parametrize("name", ["gemma4", pytest.param("gemma3n", marks=pytest.mark.slow)])


@pytest.mark.parametrize(
    ("name", "method", "bits"),
    mostly_slow(
        [("gemma4", "int8", "8"), ("gemma4", "rtn", "4"), ("gemma3n", "nf4", "4"), ("gemma3n", "float", "float32")],
        [("gemma4", "fp8", "8"), ("gemma3n", "fp8", "8"), ("gemma3n", "int8", "8"), ("gemma3n", "rtn", "4")],
    ),
)
def test_methods_give_what_transformers_computes(
    name: str, method: str, bits: str, architecture: Callable[[str], Path], tmp_path: Path
) -> None:
    """Our reader, as the whole model, and transformers with the values that are read back."""
    made = converted(architecture(name), tmp_path / "out", method, bits)
    theirs = whole_model(architecture(name))
    with torch.no_grad():
        before = theirs(input_ids=IDS).logits
        values = {key: dense(value).float() for key, value in read_back(made).items()}
        assert not theirs.load_state_dict(values, strict=False).unexpected_keys
        theirs.tie_weights()
        want = theirs(input_ids=IDS).logits
    got = engine_logits(find_engine("reference").load(Model(made, None), LoadSpec(1, 64, "float32")), IDS.numpy())
    tolerance = {"fp8": 0.3, "int8": 0.3}.get(method, 1e-4)  # our reader rounds inputs, too, as engines do
    assert (torch.from_numpy(got) - want).square().mean().sqrt() < tolerance * want.std()
    far = 1.0 if bits == "4" else 0.5 if method == "fp8" else 0.1
    assert (want - before).square().mean().sqrt() < far * before.std()


@pytest.mark.parametrize(
    ("name", "method"), mostly_slow([("gemma4", "gptq")], [("gemma4", "awq"), ("gemma3n", "gptq"), ("gemma3n", "awq")])
)
def test_learned_rounding_and_tuned_scales(
    name: str, method: str, architecture: Callable[[str], Path], tmp_path: Path
) -> None:
    learned = {"refine": True, "refine_steps": 3, "tune_steps": 2}
    made = converted(architecture(name), tmp_path / "out", method, group_size=32, **learned)
    theirs = whole_model(architecture(name))
    with torch.no_grad():
        values = {key: dense(value).float() for key, value in read_back(made).items()}
        theirs.load_state_dict(values, strict=False)
        theirs.tie_weights()
        want = theirs(input_ids=IDS).logits
    got = engine_logits(find_engine("reference").load(Model(made, None), LoadSpec(1, 64, "float32")), IDS.numpy())
    assert (torch.from_numpy(got) - want).abs().max() < 1e-4 * want.abs().max()


@one_is_slow
def test_each_batch_is_given_what_is_of_its_texts(
    name: str, architecture: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_module, "BATCH_TOKENS", 3 * LENGTH)
    trial = job_for(architecture(name), "gptq")
    with torch.no_grad():
        model = whole_model(architecture(name), torch.bfloat16)
        states = model(input_ids=calibration_ids(trial), output_hidden_states=True).hidden_states
    for block in walk(trial.job, trial.run):
        want = states[block.index].float()
        assert (block.inputs.read().float() - want).abs().max() < 2**-6 * want.abs().max()


@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_an_earlier_run_share_what_they_shared(
    name: str, architecture: Callable[[str], Path], tmp_path: Path
) -> None:
    """They are passed through with the values that they had come to."""
    trial = job_for(architecture(name), "gptq", tmp_path)
    finished: dict[int, dict[str, torch.Tensor]] = {}
    states: list[torch.Tensor] = []

    def coarser(block: Block) -> None:
        for key, layer in block.linears.items():
            block.replace(key, (layer.weight.float() * 8).round() / 8)

    for block in walk(trial.job, trial.run, exact=0.5):
        coarser(block)
        finished[block.index] = {
            block.prefix + key: value.detach().clone() for key, value in block.module.named_parameters()
        }
        states.append(block.inputs.read().clone())
    again = walk(trial.job, trial.run, exact=0.5, restore=lambda index, _: finished[index] if index < 2 else None)
    seen = 0
    for block in again:
        assert torch.equal(block.inputs.read(), states[block.index])
        coarser(block)
        seen += 1
    assert seen == 2


@one_is_slow
def test_of_tables_with_a_row_for_each_token_only_those_that_occur_are_read(
    name: str, architecture: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(architecture(name)))
    skeleton = open_skeleton(source.config)
    whole: list[str] = []
    rows: dict[str, list[int]] = {}
    tensor, some = SourceValues.tensor, SourceValues.rows
    monkeypatch.setattr(SourceValues, "tensor", lambda self, key: whole.append(key) or tensor(self, key))

    def reading(self: SourceValues, key: str, numbers: list[int]) -> torch.Tensor:
        assert key not in rows
        rows[key] = numbers
        return some(self, key, numbers)

    monkeypatch.setattr(SourceValues, "rows", reading)
    tables = {"model.embed_tokens.weight", "model.embed_tokens_per_layer.weight"}
    store, _ = embed(SourceValues(source, skeleton), skeleton, IDS, torch.device("cpu"), lambda _size: None)
    assert rows == dict.fromkeys(tables, sorted(IDS.unique().tolist()))
    assert not tables & set(whole)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    store.close()


@pytest.mark.parametrize("method", ["gptq", "float"])
def test_keys_and_values_of_blocks_that_take_those_of_others(
    method: str, architecture: Callable[[str], Path], tmp_path: Path
) -> None:
    """Published checkpoints have them, and transformers leaves them out; engines join them to quantized queries."""
    folder = shutil.copytree(architecture("gemma4"), tmp_path / "model")
    unused = {f"model.layers.3.self_attn.{name}_proj.weight": torch.ones(64, 64).bfloat16() for name in "kv"}
    save_file(load_file(folder / "model.safetensors") | unused, folder / "model.safetensors")
    how = {} if method == "float" else {"format": "compressed-tensors"}
    made = converted(folder, tmp_path / "out", method, "float32" if method == "float" else "4", **how)
    stored = load_file(made.folder / "model.safetensors")
    [note] = [note for note in made.manifest.notes if "are no part of its architecture" in note]
    if method == "float":
        assert set(made.manifest.source.kept) == set(unused)
        assert all(torch.equal(stored[name], value) for name, value in unused.items())
        assert "are kept as they are" in note
        return
    assert not [
        name for name in stored if name.startswith(("model.layers.3.self_attn.k", "model.layers.3.self_attn.v"))
    ]
    assert note.startswith("2 tensors of the source (8,192 values)")
    assert "are left out, as their blocks take what others have" in note
    ignored = json.loads((made.folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert not [rule for rule in ignored if ".3." in rule]
    verify(made)


# What blocks share


@pytest.fixture(params=[False, True])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shared]:
    store = Shared(4, tmp_path / "shared" if request.param else None)
    yield store
    assert list(tmp_path.iterdir()) == []
    store.close()


def shelf(shared: Shared, sequences: Any) -> Shelf:
    return Shelf(shared, PLACE, sequences, torch.device("cpu"))


def values(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randn(2, count, 3, 5, generator=torch.Generator().manual_seed(seed))
    return drawn[0].bfloat16(), drawn[1, :, :, :2]


def test_what_a_block_puts_is_there_for_those_after_it_and_in_the_same_call(shared: Shared) -> None:
    keys, others = values(0, 4)
    first = shelf(shared, range(2))
    first["full"] = keys[:2], others[:2]
    assert list(first) == ["full"]
    assert torch.equal(first["full"][0], keys[:2])
    assert "full" not in shelf(shared, range(2))  # another run of the same block
    with pytest.raises(KeyError):
        shelf(shared, range(2))["full"]
    shelf(shared, [3, 2])["full"] = keys[[3, 2]], others[[3, 2]]
    shared.next_block()
    for sequences in (range(4), [2, 0, 3]):
        taken = shelf(shared, sequences)["full"]
        assert torch.equal(taken[0], keys[list(sequences)])
        assert torch.equal(taken[1], others[list(sequences)])


def test_a_block_that_puts_anew_takes_what_was_there_until_the_next(shared: Shared) -> None:
    old, new = values(0, 4), values(1, 4)
    shelf(shared, range(4))["full"] = old
    shared.next_block()
    for _ in range(2):  # it runs again
        mine = shelf(shared, range(4))
        assert torch.equal(mine["full"][0], old[0])
        mine["full"] = new
        assert torch.equal(mine["full"][0], new[0])
    shared.next_block()
    assert torch.equal(shelf(shared, range(4))["full"][1], new[1])


def test_other_things_than_tensors_of_each_sequence_are_refused(shared: Shared) -> None:
    for value in ((torch.ones(3, 2),), (torch.ones(2),), ("a", "b"), torch.ones(2, 2)):
        with pytest.raises(UnsupportedError, match="something else than tensors of each sequence"):
            shelf(shared, range(2))["full"] = value  # type: ignore[assignment]
