"""Estimates for `bits: auto` that were kept: used again for the same model, text and types, and for nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_files import save_model
from tiny_models import CALIBRATION, SAMPLE, changed_copy

from quantkit.calibration import sensitivity
from quantkit.conversion import convert as conversion
from quantkit.methods.gguf import mixed_precision

pytest.importorskip("gguf")


class MeasuredAgainError(Exception):
    pass


@pytest.fixture(scope="module")
def model(once: Callable[..., Path]) -> Path:
    return once("gguf-one-block", lambda folder: save_model(folder, num_hidden_layers=1))


@pytest.fixture(scope="module")
def kept(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file of scores that one conversion has left; measuring again is an error from now on."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(cache))
        made(model, tmp_path_factory.mktemp("out") / "first")

        def measured(*_: Any) -> Any:
            raise MeasuredAgainError

        patch.setattr(sensitivity, "sensitivities", measured)
        [path] = (cache / "sensitivity").glob("*.json")
        yield path


def made(model: Path, out: Path, seed: int = 0, **calibration: Any) -> None:
    conversion.convert(
        str(model), "gguf", "auto", out, calibration=CALIBRATION | calibration, seed=seed, target_bpw=6.0
    )


def test_a_broken_file_is_not_believed(tmp_path: Path) -> None:
    odd = ('{"a": {"Q4_K": NaN}}', '{"a": {"Q4_K": "1"}}', '{"a": {"Q4_K": true}}', '{"a": ' * 99_999)
    assert sensitivity.read_scores(tmp_path / "none") == {}
    for text in ("", "{", "[1]", '{"a": 1}', *odd):
        (tmp_path / "scores.json").write_text(text)
        assert sensitivity.read_scores(tmp_path / "scores.json") == {}


def test_they_are_used_again_for_the_same_and_nothing_else(
    kept: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(model, tmp_path / "out")
    text = tmp_path / SAMPLE.name
    text.write_text(SAMPLE.read_text()[3000:])
    others: list[tuple[Path, dict[str, Any]]] = [
        (changed_copy(model, tmp_path / "1" / model.name, lambda t: t["model.norm.weight"].mul_(1.5)), {}),
        (changed_copy(model, tmp_path / "2" / model.name, rms_norm_eps=1e-3), {}),
        *((model, changes) for changes in ({"text": str(text)}, {"sequences": 7}, {"length": 31}, {"seed": 1})),
    ]
    for number, (other, changes) in enumerate(others):
        with pytest.raises(MeasuredAgainError):
            made(other, tmp_path / f"out-{number}", **changes)
    for module, name in ((sensitivity, "SEQUENCES"), (mixed_precision, "VERSION")):
        with monkeypatch.context() as patch, pytest.raises(MeasuredAgainError):  # noqa: PT012
            patch.setattr(module, name, getattr(module, name) - 1)
            made(model, tmp_path / name)


@pytest.mark.parametrize("lost", ["a type", "a tensor", "a number"])
def test_they_are_not_used_where_one_is_missing(lost: str, kept: Path, model: Path, tmp_path: Path) -> None:
    before = kept.read_text()
    scores = json.loads(before)
    name = sorted(scores)[-1]
    if lost == "a type":
        del scores[name]["Q4_K"]
    elif lost == "a tensor":
        del scores[name]
    else:
        scores[name]["Q4_K"] = float("nan")
    kept.write_text(json.dumps(scores))
    try:
        with pytest.raises(MeasuredAgainError):
            made(model, tmp_path / "out")
    finally:
        kept.write_text(before)
    made(model, tmp_path / "again")
