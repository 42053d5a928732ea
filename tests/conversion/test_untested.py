"""An architecture that no test holds against transformers is taken, and told."""

from pathlib import Path

import pytest
from tiny_architectures import save_architecture
from tiny_llama import VOCABULARY, converted, save_tokenizer
from transformers import AutoModelForCausalLM, CodeGenConfig

from quantkit.conversion.verify import verify


@pytest.mark.parametrize("method", ["rtn", "nf4"])
def test_an_untested_architecture_is_told_at_its_conversion(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = CodeGenConfig(
        vocab_size=VOCABULARY, n_embd=64, n_inner=128, n_layer=1, n_head=4, n_positions=64, rotary_dim=8,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    artifact = converted(folder, tmp_path / "out", method)
    verify(artifact)
    [note] = [note for note in artifact.manifest.notes if "untested" in note]
    assert "'codegen'" in note


def test_a_proven_one_is_not(tmp_path: Path) -> None:
    artifact = converted(save_architecture(tmp_path / "model", "olmo"), tmp_path / "out", "rtn")
    assert not [note for note in artifact.manifest.notes if "untested" in note]
