"""transformers as the judge: what it would make up or leave out is told."""

from pathlib import Path

import pytest
from tiny_models import EVALUATION, changed_copy, save_tiny

from quantkit import evaluate
from quantkit.errors import EngineError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def judged(folder: Path) -> tuple[str, ...]:
    settings = {**EVALUATION, "divergence": False}
    return evaluate(folder, ("perplexity",), engine="transformers", **settings).engine.notes


def test_a_whole_model_has_no_note(tiny: Path) -> None:
    assert judged(tiny) == ()


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (lambda t: t.update({"gain": t.pop("model.norm.weight")}), {}),
        (None, {"num_hidden_layers": 4}),
        (None, {"tie_word_embeddings": False}),
    ],
    ids=["another name", "more layers", "a head of its own"],
)
def test_a_parameter_without_a_tensor_is_refused(
    change: object, config: dict[str, object], tiny: Path, tmp_path: Path
) -> None:
    folder = changed_copy(tiny, tmp_path / "changed", change, **config)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"has no tensor for \d+ parameters of LlamaForCausalLM, such as "):
        judged(folder)


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (lambda t: t.update({"model.extra.weight": t["model.norm.weight"].clone()}), {}),
        (None, {"num_hidden_layers": 2}),
    ],
    ids=["a tensor more", "fewer layers"],
)
def test_a_tensor_that_is_left_out_is_told(
    change: object, config: dict[str, object], tiny: Path, tmp_path: Path
) -> None:
    folder = changed_copy(tiny, tmp_path / "changed", change, **config)  # type: ignore[arg-type]
    (note,) = judged(folder)
    assert note.startswith("transformers leaves out ")
