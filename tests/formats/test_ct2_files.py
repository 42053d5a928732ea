"""CTranslate2's files: our frugal way gives the bytes of its own converter, and damaged ones are refused."""

import json
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from ctranslate2.converters import TransformersConverter
from gguf_files import slow_but
from safetensors.torch import load_file, save_file
from tiny_ct2 import EXACT, config_of, save_checkpoint, text, variable
from tiny_ct2 import convert as convert_ct2
from tiny_models import changed_copy
from transformers import AutoModelForCausalLM
from trials import prepared

from quantkit.errors import ArtifactError, QuantkitError, UnsupportedError
from quantkit.formats.ctranslate2 import converter
from quantkit.formats.ctranslate2.architectures import SourceTensors, readable
from quantkit.formats.ctranslate2.converter import write_model
from quantkit.formats.ctranslate2.model_file import REVISION, SPEC, VERSION, open_ct2_model, refuse_settings
from quantkit.formats.source import open_source
from quantkit.methods.ctranslate2 import METHOD, _proven_part
from quantkit.models.config import open_config


def foreign(checkpoint, kind, out, dtype=torch.float32):
    """What CTranslate2's own converter writes, which holds the whole model."""

    class Stored(TransformersConverter):
        def load_model(self, _class, path, **settings):
            model = super().load_model(AutoModelForCausalLM, path, **{**settings, "dtype": dtype})
            model.config = readable(model.config)
            return model

    return Path(Stored(str(checkpoint)).convert(str(out), quantization=kind))


def ours(checkpoint, kind, out):
    source = open_source(str(checkpoint))
    out.mkdir()
    source.copy_side_files(out)
    write_model(source, out, kind)
    return out


def refuse_difference(one, other):
    assert (one / "model.bin").read_bytes() == (other / "model.bin").read_bytes()
    mended = json.loads((one / "config.json").read_text())
    plain = json.loads((other / "config.json").read_text())
    assert mended == {key: "" if value is None and key.endswith("_token") else value for key, value in plain.items()}


QUICK = ("llama bias", "mistral", "gemma3", "gemma4", "gpt2", "gptj", "opt projected", "bloom", "falcon grouped")
QUICK += ("int8", "int8_bfloat16", "int16", "bfloat16")


@pytest.mark.parametrize("name", slow_but(QUICK, EXACT))
def test_every_architecture_gives_the_bytes_of_the_engines_converter(name, tmp_path, monkeypatch):
    monkeypatch.setattr(converter, "SLAB", 3000)  # tensors come in several slabs, the last one shorter
    config, settings = EXACT[name]
    checkpoint = save_checkpoint(tmp_path / "source", config_of(config, **settings))
    for kind in ("int8", "float16"):
        refuse_difference(
            ours(checkpoint, kind, tmp_path / kind), foreign(checkpoint, kind, tmp_path / f"{kind} whole")
        )


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
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


@pytest.mark.parametrize("name", slow_but(QUICK, METHOD.bits))
def test_every_kind_gives_the_bytes_of_the_engines_converter(name, llama, tmp_path):
    made = ours(llama, name, tmp_path / "ours")
    refuse_difference(made, foreign(llama, name, tmp_path / "whole", torch.bfloat16))
    aliases = open_ct2_model(made / "model.bin").aliases
    assert (
        aliases["decoder/layer_1/self_attention/layer_norm/gamma"] == "decoder/layer_0/self_attention/layer_norm/gamma"
    )
    assert aliases["decoder/layer_1/ffn/linear_1/weight"] == "decoder/layer_0/ffn/linear_1/weight"


def test_a_variable_beyond_the_formats_sizes_is_refused(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(converter, "MOST_BYTES", 296 * 64 * 4 - 1)
    with pytest.raises(UnsupportedError, match=r"decoder/embeddings/weight would have 75,776 bytes as float32"):
        ours(llama, "float32", tmp_path / "out")
    ours(llama, "int8", tmp_path / "small")


@pytest.mark.parametrize(("case", "blocks"), [("gpt2", 1), ("gemma3", 6), ("gemma4", 6)])
def test_a_large_model_is_proven_on_its_first_blocks(case, blocks, tmp_path, monkeypatch):
    name, settings = EXACT[case]
    more = {"n_layer": 7} if "n_layer" in settings else {"num_hidden_layers": 7, "layer_types": None}
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


pytest.importorskip("ctranslate2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ct2")
    return convert_ct2(save_checkpoint(folder / "llama", config_of("LlamaConfig")), "int8", folder / "int8")


def file_of(path, *variables, aliases=(), count=None, revision=REVISION):
    head = struct.pack("<I", VERSION) + text(SPEC)
    head += struct.pack("<II", revision, len(variables) if count is None else count)
    tail = struct.pack("<I", len(aliases)) + b"".join(text(a) + text(b) for a, b in aliases)
    path.write_bytes(head + b"".join(variables) + tail)
    return path


ONE = variable("a", (2,), "float32", bytes(8))


@pytest.mark.parametrize(
    ("variables", "how", "says"),
    [
        ([ONE], {"count": 2**32 - 1}, "is truncated|no string|corrupted"),
        ([variable("a", (2**31, 2**31), "float32", b"", 0)], {}, "do not match"),
        ([variable("a", (1,) * 9, "float32", bytes(4))], {}, "has 9 dimensions"),
        ([ONE, ONE], {}, "twice"),
        ([ONE], {"aliases": [("b", "c")]}, "the alias b is used twice, or points to c"),
        ([ONE], {"revision": 7}, f"holds a '{SPEC}' of revision 7, expected"),  # for which the engine has no model
    ],
)
def test_counts_sizes_and_names_are_held_against_the_file(variables, how, says, tmp_path):
    path = file_of(tmp_path / "model.bin", ONE, aliases=[("b", "a")])
    assert open_ct2_model(path).values("b").tolist() == [0.0, 0.0]
    with pytest.raises(ArtifactError, match=says):
        open_ct2_model(file_of(path, *variables, **how))


@pytest.mark.parametrize(
    "scale",
    [
        variable("a_scale", (2,), "float32", np.array([np.nan, 1.0], "<f4").tobytes()),
        variable("a_scale", (2, 1), "float32", np.ones(2, "<f4").tobytes()),
        variable("a_scale", (2,), "int8", b"\1\1"),
        variable("other", (2,), "float32", np.ones(2, "<f4").tobytes()),
    ],
)
def test_codes_without_a_usable_scale_are_refused(scale, tmp_path):
    model = open_ct2_model(file_of(tmp_path / "model.bin", variable("a", (2, 2), "int8", b"\1\2\3\4"), scale))
    with pytest.raises(ArtifactError, match=r"a_scale|the scale of a"):
        model.values("a")


def test_flipped_and_cut_files_are_read_or_refused(made, tmp_path):
    whole, settings = (made.folder / "model.bin").read_bytes(), open_config(made.source.config)
    rng, path = random.Random(0), tmp_path / "model.bin"
    starts = [v.start for v in open_ct2_model(made.folder / "model.bin").variables.values()]
    refusals = 0
    for _ in range(150):
        data = bytearray(whole)
        place = max(0, rng.choice(starts) - rng.randrange(1, 40))  # names, shapes, types and sizes
        data[place] = rng.randrange(256)
        path.write_bytes(bytes(data) if rng.random() < 0.8 else bytes(data[:place]))
        try:
            tensors = SourceTensors(open_ct2_model(path), settings)
            for name in tensors.names():
                tensors.read(name).whole()
        except QuantkitError as error:
            refusals += 1
            assert str(path) in str(error)  # noqa: PT017
    assert refusals > 75


@pytest.mark.parametrize("value", ["NaN", "1e999", "1" + "0" * 400, "[]"])
def test_settings_that_the_engine_cannot_read_are_refused(value, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(f'{{"layer_norm_epsilon": {value}}}')
    with pytest.raises(ArtifactError, match=r"config\.json"):
        refuse_settings(path)


def test_a_vocabulary_that_is_none_is_told(made, tmp_path):
    from quantkit.engines.ctranslate2 import Ct2Generator

    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    for content in ("{}", "[1, 2]", "[" * 100_000):
        (tmp_path / "vocabulary.json").write_text(content)
        with pytest.raises(ArtifactError, match=r"vocabulary\.json"):
            Ct2Generator(tmp_path, "float32", 1)


def test_a_model_that_answers_nan_is_not_proven(tmp_path):
    """Weights that are finite and whose logits are not: a difference of NaN is below no bound."""

    def change(tensors):
        tensors["lm_head.weight"][:] = 3e38
        tensors["lm_head.weight"][::2] *= -1

    plain = save_checkpoint(tmp_path / "llama", config_of("LlamaConfig", tie_word_embeddings=False))
    checkpoint = changed_copy(plain, tmp_path / "changed", change)
    trial = prepared(checkpoint, "ctranslate2", "float32", tmp_path / "out")
    trial.check()
    with pytest.raises(UnsupportedError, match="mean difference of log-probabilities nan"):
        trial.write()
