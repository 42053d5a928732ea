"""What holds for every format that is written, and for the artifact of every registered method."""

import math
import re

import pytest
import torch
from tiny_models import SAMPLE
from trials import dense, dense_values

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine, find_format, find_method, formats, formats_for, methods
from quantkit.contracts.stored import open_stored, stored_values
from quantkit.conversion.verify import verify
from quantkit.data.texts import load_text
from quantkit.errors import QuantkitError
from quantkit.evaluation.engine_choice import refusal
from quantkit.evaluation.perplexity import ProbeJob, measure_perplexity
from quantkit.evaluation.protocols import cut
from quantkit.formats._quantization_config import quantization_of
from quantkit.formats.gguf.file_types import IQ_MIXES
from quantkit.formats.source import open_source
from quantkit.records.artifact import open_artifact
from quantkit.records.recipe import EvaluationSpec
from quantkit.system.modules import missing_modules
from quantkit.system.progress import Progress

# A method for each format that needs no calibration, and its options.
MADE_BY = {
    "awq": ("rtn", {"sym": False, "format": "awq"}), "bitsandbytes": ("nf4", {}),
    "compressed-tensors": ("rtn", {"format": "compressed-tensors"}), "ctranslate2": ("ctranslate2", {}),
    "float": ("float", {}), "gguf": ("gguf", {}), "gptq": ("rtn", {}),
    "mlx": ("rtn", {"format": "mlx"}),
}  # fmt: skip
every_format = pytest.mark.parametrize("name", MADE_BY)


@pytest.fixture(scope="module")
def artifacts(artifact_of, one_block):
    def get(name):
        method, options = MADE_BY[name]
        return artifact_of(method, model=one_block, **options)

    return get


def recognized(path):
    """Names of the formats that take it for theirs."""
    return [name for name, kind in formats().items() if kind.recognizes(path)]


@every_format
def test_it_recognizes_its_own_kind_and_gives_one_tensor_by_name_as_in_order(name, artifacts):
    artifact = artifacts(name)
    assert artifact.manifest.format == name
    assert recognized(artifact.folder) == [name]
    values = dense_values(artifact)
    assert len(values) == 11
    reader = open_stored(artifact, find_format(name))
    assert reader.names() == list(values)
    for tensor in reversed(reader.names()):
        value = dense(reader.read(tensor))
        assert (value.dtype, value.shape) == (values[tensor].dtype, values[tensor].shape), tensor
        assert torch.equal(value, values[tensor]), tensor
    with pytest.raises(QuantkitError, match=r"model\.layers\.9\.mlp\.up_proj\.weight"):
        reader.read("model.layers.9.mlp.up_proj.weight")


@every_format
def test_its_kinds_hold_all_that_methods_write_in_it(name):
    """Or the table of what loads what lacks a row."""
    assert list(MADE_BY) == [name for name, kind in formats().items() if kind.holds]
    kinds = re.findall(r"\w+", " ".join(kind.bits for kind in find_format(name).kinds))
    written = {bits for method in methods().values() for bits in method.bits if name in formats_for(method, bits)}
    if name == "awq":
        written = {"4"}
    elif name == "gguf":
        written -= {"Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M"}  # between its ends
        written -= {*IQ_MIXES[1:-1]}
        written = written - {"2", "3", "4", "6", "8", "mxfp4"} | {"Q4_0", "MXFP4"}  # codes, of which 8 bits are Q8_0
    elif name in ("gptq", "compressed-tensors"):
        written -= {"6"}  # of MLX alone
    elif name == "ctranslate2":
        written = {bits for bits in written if not bits.startswith("int8_")}  # its mixes
    assert written == set(kinds) - {"to", "and", "its", "mixes"}


@pytest.mark.parametrize("name", ["awq", "compressed-tensors", "gptq", "bitsandbytes"])
def test_what_engines_refuse_of_it_is_what_they_refuse_of_its_kind(name, artifacts):
    stored, quantization = find_format(name), quantization_of(artifacts(name).folder)
    words = {"awq": "zero points", "bitsandbytes": "NF4, double quantization"}.get(name, "symmetric")
    [kind] = [kind for kind in stored.kinds if (kind.bits, kind.words) == ("4", words)]
    assert stored.refusals(quantization) == stored.refusals(kind.quantization)


def test_sources_and_single_files_are_recognized_and_other_things_are_not(artifacts, tiny, tmp_path):
    assert recognized(tiny) == ["float"]
    assert recognized(next(artifacts("gguf").folder.glob("*.gguf"))) == ["gguf"]
    (tmp_path / "text.gguf").write_text("no such file")
    for name, content in (("broken", "[1"), ("list", '["quantization_config"]')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    (tmp_path / "list" / "model.bin").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for path in (*tmp_path.iterdir(), tmp_path / "nowhere", artifacts("float").folder / "config.json"):
        assert recognized(path) == [], path


N_CTX = 64


@pytest.fixture(scope="module", params=methods())
def artifact(request, artifact_of, one_block):
    """The artifact of a method at its default options; of one that keeps codes, after they were rounded."""
    model = artifact_of("rtn", None, model=one_block).folder if request.param == "keep" else one_block
    return artifact_of(request.param, None, model=model)


def perplexity(model, engine, folder):
    """Measured in this process by the engine `engine` on two windows."""
    spec = EvaluationSpec(text=str(SAMPLE), n_ctx=N_CTX, limit=2)
    windows = cut(load_text(spec.text, "evaluation"), model.tokenizer(), spec.protocol, N_CTX, spec.limit)
    assert refusal(find_engine(engine), model) is None
    loaded = find_engine(engine).load(model, LoadSpec(threads=1, n_ctx=N_CTX))
    job = ProbeJob(loaded, model, spec, 1, windows, Progress(), folder / "positions")
    [measurement] = measure_perplexity(job)
    return measurement.value


def test_it_opens_verifies_and_reads_back_every_tensor_of_the_source(artifact, one_block):
    opened = open_artifact(artifact.folder)
    assert opened.manifest.recipe.bits == find_method(opened.manifest.recipe.method).default_bits
    assert verify(opened) == opened == artifact
    assert sum(opened.manifest.tensor_types.values()) >= 7
    shapes = {}
    for name, stored in stored_values(open_stored(artifact, find_format(artifact.manifest.format))):
        assert name not in shapes, name
        value = dense(stored)
        assert bool(torch.isfinite(value).all()), name
        shapes[name] = tuple(value.shape)
    assert shapes == {name: info.shape for name, info in open_source(str(one_block)).tensors.items()}


def test_its_engines_agree(artifact, tmp_path):
    model = Model(artifact, None)
    engines = find_format(artifact.manifest.format).engines
    perplexities = {
        name: perplexity(model, name, tmp_path) for name in engines if not missing_modules((find_engine(name).module,))
    }
    assert all(math.isfinite(value) for value in perplexities.values())
    assert max(perplexities.values()) < 1.03 * min(perplexities.values()), perplexities
