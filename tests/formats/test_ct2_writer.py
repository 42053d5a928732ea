"""Our frugal way to CTranslate2's files gives the bytes of its own converter."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from ctranslate2.converters import TransformersConverter
from safetensors.torch import load_file, save_file
from tiny_ct2 import EXACT, config_of, save_checkpoint

from quantkit.errors import UnsupportedError
from quantkit.formats.ctranslate2 import writer
from quantkit.formats.ctranslate2.converter import write_model
from quantkit.formats.ctranslate2.model_file import open_ct2_model
from quantkit.formats.source import open_source
from quantkit.methods.ctranslate2 import METHOD, _proven_part


def foreign(checkpoint: Path, kind: str, out: Path, dtype: torch.dtype = torch.float32) -> Path:
    """What CTranslate2's own converter writes, which holds the whole model."""

    class Stored(TransformersConverter):
        def load_model(self, model_class: Any, path: str, **settings: Any) -> Any:
            return super().load_model(model_class, path, **{**settings, "dtype": dtype})

    return Path(Stored(str(checkpoint)).convert(str(out), quantization=kind))


def ours(checkpoint: Path, kind: str, out: Path) -> Path:
    source = open_source(str(checkpoint))
    out.mkdir()
    source.copy_side_files(out)
    write_model(source, out, kind)
    return out


def refuse_difference(one: Path, other: Path) -> None:
    assert (one / "model.bin").read_bytes() == (other / "model.bin").read_bytes()
    mended = json.loads((one / "config.json").read_text())
    plain = json.loads((other / "config.json").read_text())
    assert mended == {key: "" if value is None and key.endswith("_token") else value for key, value in plain.items()}


QUICK = ("llama bias", "mistral", "gemma3", "gpt2", "gptj", "opt projected", "bloom", "falcon grouped")
QUICK += ("int8", "int8_bfloat16", "int16", "bfloat16")


def quick_and_slow(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in names]
    )


@quick_and_slow(EXACT)
def test_every_architecture_gives_the_bytes_of_the_engines_converter(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SLAB", 3000)  # tensors come in several slabs, the last one shorter
    config, settings = EXACT[name]
    checkpoint = save_checkpoint(tmp_path / "source", config_of(config, **settings))
    for kind in ("int8", "float16"):
        refuse_difference(
            ours(checkpoint, kind, tmp_path / kind), foreign(checkpoint, kind, tmp_path / f"{kind} whole")
        )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16, with what the engine stores once: equal tensors, of which some differ in a -0."""
    checkpoint = save_checkpoint(tmp_path_factory.mktemp("llama") / "source", config_of("LlamaConfig"))
    path = checkpoint / "model.safetensors"
    tensors = {name: value.to(torch.bfloat16) for name, value in load_file(path).items()}
    norm, other = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    tensors[norm][:8] = 0.0
    tensors[other] = tensors[norm].clone()
    tensors[other][:4] = -0.0
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].clone()
    tensors["model.layers.0.mlp.up_proj.weight"][3] = 0.0  # a row without a scale of its own
    save_file(tensors, path, metadata={"format": "pt"})
    return checkpoint


@quick_and_slow(METHOD.bits)
def test_every_kind_gives_the_bytes_of_the_engines_converter(name: str, llama: Path, tmp_path: Path) -> None:
    made = ours(llama, name, tmp_path / "ours")
    refuse_difference(made, foreign(llama, name, tmp_path / "whole", torch.bfloat16))
    aliases = open_ct2_model(made / "model.bin").aliases
    assert (
        aliases["decoder/layer_1/self_attention/layer_norm/gamma"] == "decoder/layer_0/self_attention/layer_norm/gamma"
    )
    assert aliases["decoder/layer_1/ffn/linear_1/weight"] == "decoder/layer_0/ffn/linear_1/weight"


def test_a_variable_beyond_the_formats_sizes_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MOST_BYTES", 296 * 64 * 4 - 1)
    with pytest.raises(UnsupportedError, match=r"decoder/embeddings/weight would have 75,776 bytes as float32"):
        ours(llama, "float32", tmp_path / "out")
    ours(llama, "int8", tmp_path / "small")


@pytest.mark.parametrize(("case", "blocks"), [("gpt2", 1), ("gemma3", 6)])
def test_a_large_model_is_proven_on_its_first_blocks(
    case: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, settings = EXACT[case]
    more = {"n_layer": 7} if "n_layer" in settings else {"num_hidden_layers": 7}
    source = open_source(str(save_checkpoint(tmp_path / "source", config_of(name, **settings | more))))
    assert _proven_part(source) is None
    monkeypatch.setattr("quantkit.methods.ctranslate2.PROVEN_WEIGHTS", 1000)
    short = _proven_part(source)
    assert short.settings.num_hidden_layers == blocks  # of Gemma 3: one with the whole text before it, too
    short.copy_side_files(tmp_path)
    write_model(short, tmp_path, "int8")
    names = open_ct2_model(tmp_path / "model.bin").variables
    assert f"decoder/layer_{blocks - 1}/ffn/linear_0/weight" in names
    assert f"decoder/layer_{blocks}/ffn/linear_0/weight" not in names
