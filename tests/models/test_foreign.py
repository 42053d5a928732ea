"""What transformers' code of an architecture that nobody has tried raises is told in one line, and nothing is left."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_logits import engine_logits
from tiny_architectures import ARCHITECTURES, Tiny, save_architecture, whole_model
from tiny_llama import converted
from tiny_more import settings_of
from transformers import CONFIG_MAPPING, LlamaConfig, XLMConfig

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.errors import UnsupportedError
from quantkit.formats.source import open_source
from quantkit.models.architectures.foreign import Signal, running

MORE_HEADS = {"glm_moe_dsa": {"num_key_value_heads": 4, "index_n_heads": 8}}
IDS = np.arange(40).reshape(2, 20) * 7 % 300


def saved(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch, **settings: int) -> Path:
    """A tiny decoder of any `model_type`."""
    decoder = {"is_decoder": True} if "is_decoder" in CONFIG_MAPPING[kind]().to_dict() else {}
    tiny = Tiny(CONFIG_MAPPING[kind].__name__, 1, settings_of(kind) | decoder | settings)
    monkeypatch.setitem(ARCHITECTURES, kind, tiny)
    return save_architecture(folder / kind, kind)


def reference(folder: Path, walk: bool = False) -> np.ndarray:
    spec = LoadSpec(threads=1, n_ctx=64, dtype="float32", walk=walk)
    return engine_logits(find_engine("reference").load(Model(None, open_source(str(folder))), spec), IDS)


@pytest.mark.parametrize(
    ("kind", "method", "says"),
    [
        ("xlm", "gptq", "changes hidden states between its blocks"),
        ("glm_moe_dsa", "gptq", "more of the one before it"),
        ("xlm", "awq", "'xlm' is untested, and .* in block 0 .MultiHeadAttention.: RuntimeError: The expanded size"),
    ],
)
def test_a_conversion_is_refused_in_one_line_and_leaves_nothing(
    kind: str, method: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, kind, monkeypatch, **MORE_HEADS.get(kind, {}))
    with pytest.raises(UnsupportedError, match=says) as caught:
        converted(folder, tmp_path / "out", method, group_size=16)
    assert re.search(r"Methods that take this model: .*rtn:4\.$", str(caught.value))
    assert [path.name for path in tmp_path.iterdir()] == [kind]


@pytest.mark.parametrize(
    ("kind", "walk", "where"),
    [
        ("xmod", True, "XmodModel, around its blocks: ValueError: Input language unknown"),
        ("glm_moe_dsa", False, "GlmMoeDsaForCausalLM: RuntimeError: The size of tensor"),
    ],
)
def test_an_evaluation_is_refused_in_one_line(
    kind: str, walk: bool, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, kind, monkeypatch)
    with pytest.raises(UnsupportedError, match=f"'{kind}' is untested, and transformers' code .* in {where}"):
        reference(folder, walk)


@pytest.mark.parametrize(("kind", "walk"), [("electra", False), ("rembert", True)])
def test_a_head_that_changes_the_states_before_its_output_layer_is_computed(
    kind: str, walk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To another width in electra and rembert."""
    folder = saved(tmp_path, kind, monkeypatch)
    with torch.no_grad():
        want = whole_model(folder)(input_ids=torch.from_numpy(IDS)).logits.numpy()
    assert np.abs(reference(folder, walk) - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("passes", [MemoryError(), RuntimeError("can't allocate memory"), Signal()])
def test_what_is_no_fault_of_the_architecture_passes(passes: BaseException) -> None:
    with pytest.raises(type(passes)) as caught, running(XLMConfig(), "block 0"):
        raise passes
    assert caught.value is passes


def test_errors_of_a_proven_architecture_are_not_hidden() -> None:
    with pytest.raises(TypeError, match="no such thing"), running(LlamaConfig(), "block 0"):
        raise TypeError("no such thing")
