"""AWQ's layout as the target of other methods: the same grid as in GPTQ's layout, without a loss."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_logits import engine_logits
from safetensors.torch import load_file
from tiny_llama import LINEARS, converted
from tiny_models import changed_copy
from trials import read_back

from quantkit import open_artifact, verify
from quantkit.artifact import Artifact
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine, find_format
from quantkit.conversion.convert import convert
from quantkit.errors import RecipeError
from quantkit.formats._quantization_config import quantization_of
from quantkit.formats.source import open_model
from quantkit.numerics.grouped_weight import GroupedWeight

GROUP = 64
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Artifacts = Callable[..., Artifact]


@pytest.fixture(scope="module")
def artifacts(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Artifacts of the tiny llama in groups of 64, each made once."""
    made: dict[tuple[Any, ...], Artifact] = {}

    def get(method: str, kind: str, sym: bool = False) -> Artifact:
        key = (method, kind, sym)
        if key not in made:
            out = tmp_path_factory.mktemp("artifacts") / "out"
            made[key] = converted(tiny_llama, out, method, group_size=GROUP, sym=sym, format=kind)
        return made[key]

    return get


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """(R, C) int32 words -> (R, 8 C) codes in AWQ's order; written from the layout's description."""
    out = torch.zeros(words.shape[0], words.shape[1] * 8, dtype=torch.int64)
    for place, column in enumerate(ORDER):
        out[:, column::8] = (words.long() >> (4 * place)) & 15
    return out


@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_the_weights_are_those_of_gptqs_layout(method: str, sym: bool, artifacts: Artifacts) -> None:
    ours, theirs = (artifacts(method, kind, sym) for kind in ("awq", "gptq"))
    assert (ours.manifest.format, theirs.manifest.format) == ("awq", "gptq")
    assert (ours.manifest.recipe.method, ours.manifest.recipe.format) == (method, "awq")
    assert ours.label == f"{method}-4 group_size={GROUP} sym={sym} format=awq"
    one, other = read_back(ours), read_back(theirs)
    assert set(one) == set(other)
    for name, value in one.items():
        same = other[name]
        if name not in LINEARS:
            assert isinstance(value, torch.Tensor)
            assert isinstance(same, torch.Tensor)
            assert torch.equal(value, same)
            continue
        assert isinstance(value, GroupedWeight)
        assert isinstance(same, GroupedWeight)
        assert torch.equal(value.dense(), same.dense())
        for part in ("codes", "zeros", "scales", "g_idx"):
            assert torch.equal(getattr(value, part), getattr(same, part)), (name, part)
        assert (int(value.zeros.min()) == int(value.zeros.max()) == 8) == sym
    assert ours.manifest.weight_error == theirs.manifest.weight_error
    assert ours.manifest.tensor_types == theirs.manifest.tensor_types == {"int4": 21, "float16": 8}
    assert verify(ours) == open_artifact(ours.folder)


def test_engines_find_awqs_layout(artifacts: Artifacts) -> None:
    artifact = artifacts("gptq", "awq")
    assert json.loads((artifact.folder / "config.json").read_text())["quantization_config"] == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    assert not (artifact.folder / "quantize_config.json").exists()
    assert not any("vLLM loads only symmetric" in note for note in artifact.manifest.notes)
    tensors = load_file(artifact.folder / "model.safetensors")
    values = read_back(artifact)
    for name in LINEARS:
        value, stem = values[name], name.removesuffix("weight")
        assert isinstance(value, GroupedWeight)
        assert stem + "g_idx" not in tensors
        scales = tensors[stem + "scales"].float().repeat_interleave(GROUP, 0)
        zeros = unpacked(tensors[stem + "qzeros"]).repeat_interleave(GROUP, 0)
        assert torch.equal((unpacked(tensors[stem + "qweight"]) - zeros).float().mul(scales).T, value.dense())


def test_readers_and_engines_go_by_the_format_not_by_the_method(artifacts: Artifacts) -> None:
    ours, theirs = artifacts("gptq", "awq"), artifacts("gptq", "gptq")
    manifest = ours.manifest
    reader = find_format("awq").open(ours.folder, manifest.weight_files, dict(manifest.source.config))
    values = read_back(ours)
    assert reader.names() == list(values)
    for name in LINEARS:
        value, same = reader.read(name), values[name]
        assert isinstance(value, GroupedWeight)
        assert isinstance(same, GroupedWeight)
        assert torch.equal(value.dense(), same.dense())
    wrong = find_format("gptq").open(ours.folder, manifest.weight_files, dict(manifest.source.config))
    with pytest.raises(Exception, match="g_idx"):
        wrong.read(LINEARS[0])
    ids = np.arange(2, 40)[None]
    one, other = (
        engine_logits(find_engine("reference").load(open_model(artifact), LoadSpec(threads=1, n_ctx=64)), ids)
        for artifact in (ours, theirs)
    )
    assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("method", "bits", "options", "says"),
    [
        ("gptq", "8", {"sym": False}, "the format awq holds codes of 4 bits, not of 8"),
        ("rtn", "8", {}, "the format awq holds codes of 4 bits, not of 8"),
        ("gptq", "4", {"desc_act": True}, "the format awq cannot say which columns form a group: leave desc_act out"),
        ("nf4", "4", {}, r"nf4 cannot be written as 'awq'.*Its formats: bitsandbytes\."),
        ("gguf", None, {}, r"gguf cannot be written as 'awq'.*Its formats: gguf\."),
        (
            "gptq",
            "4",
            {"format": "awk"},
            r"gptq cannot be written as 'awk'\. Did you mean 'awq'\? Its formats: gptq, awq",
        ),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_long_work(
    method: str,
    bits: str | None,
    options: dict[str, Any],
    says: str,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quantkit.conversion.check.draw_tokens", lambda *_: pytest.fail("the text was read"))
    monkeypatch.setattr("quantkit.conversion.convert.staged", lambda *_: pytest.fail("the work was begun"))
    with pytest.raises(RecipeError, match=says):
        convert(str(tiny_llama), method, bits, tmp_path / "out", **{"format": "awq", **options})
    assert list(tmp_path.iterdir()) == []


def refusals(artifact: Artifact) -> Mapping[str, str]:
    return find_format(artifact.manifest.format).refusals(quantization_of(artifact.folder))


def test_vllm_refuses_zero_points_in_gptqs_layout_whatever_method_wrote_them(artifacts: Artifacts) -> None:
    assert "vllm" in refusals(artifacts("rtn", "gptq"))
    assert "vllm" not in refusals(artifacts("rtn", "gptq", sym=True))
    assert "vllm" not in refusals(artifacts("rtn", "awq"))


def test_vllm_refuses_what_awq_writes_in_gptqs_layout(tiny_llama: Path, tmp_path: Path) -> None:
    artifact = converted(tiny_llama, tmp_path / "out", "awq", group_size=GROUP, format="gptq")
    assert set(refusals(artifact)) == {"transformers", "vllm"}


@pytest.mark.parametrize(("kind", "least"), [("awq", 0), ("gptq", 1)])
def test_awq_fits_weights_above_zero_with_zero_points_that_the_layout_can_store(
    kind: str, least: int, tiny_llama: Path, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    model = changed_copy(tiny_llama, tmp_path / "model", lambda tensors: tensors[name].abs_())
    artifact = converted(model, tmp_path / "out", "awq", group_size=GROUP, format=kind)
    value = read_back(artifact)[name]
    assert isinstance(value, GroupedWeight)
    assert int(value.zeros.min()) == least
    assert float(value.dense().min()) >= 0.0
