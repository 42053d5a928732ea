"""What holds for every registered method: its artifact opens, verifies, covers its source, and runs in its engines."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import SAMPLE
from trials import dense

from quantkit.artifact import Artifact, open_artifact
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.probe import ProbeJob
from quantkit.contracts.registry import find_engine, find_format, find_method, find_probe, methods
from quantkit.contracts.stored import open_stored, stored_values
from quantkit.conversion.verify import verify
from quantkit.data.texts import load_text
from quantkit.evaluation.engine_choice import refusal
from quantkit.evaluation.protocols import cut
from quantkit.formats.source import open_model, open_source
from quantkit.progress import Progress
from quantkit.recipe import EvaluationSpec
from quantkit.system.modules import lacks

# Bits that hardly change a model, in the words of the methods that have them.
FINE = ("8", "Q8_0", "float16", "int8", "int16")
N_CTX = 64
Converted = Callable[[str, str | None], Artifact]


@pytest.fixture(scope="module")
def one_block(tiny_with: Callable[..., Path]) -> Path:
    return tiny_with(num_hidden_layers=1)


@pytest.fixture(scope="module")
def converted(artifact_of: Callable[..., Artifact], one_block: Path) -> Converted:
    """The artifact of a method at its default options; of one that keeps codes, after they were rounded."""

    def get(method: str, bits: str | None) -> Artifact:
        model = artifact_of("rtn", bits, model=one_block).folder if method == "keep" else one_block
        return artifact_of(method, bits, model=model)

    return get


@pytest.fixture(scope="module", params=methods())
def artifact(request: pytest.FixtureRequest, converted: Converted) -> Artifact:
    return converted(request.param, None)


def perplexity(model: Model, engine: str, dtype: str | None = None) -> float:
    """Measured in this process by the engine `engine` on two windows."""
    spec = EvaluationSpec(text=str(SAMPLE), n_ctx=N_CTX, limit=2)
    windows = cut(load_text(spec.text, "evaluation"), model.tokenizer(), spec.protocol, N_CTX, spec.limit)
    assert refusal(find_engine(engine), model) is None
    loaded = find_engine(engine).load(model, LoadSpec(threads=1, n_ctx=N_CTX, dtype=dtype))
    job = ProbeJob(loaded, model, spec, 1, windows, Progress())
    [measurement] = find_probe("perplexity").run(job)
    return measurement.value


def test_it_opens_verifies_and_reads_back_every_tensor_of_the_source(artifact: Artifact, one_block: Path) -> None:
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


def test_its_engines_agree(artifact: Artifact) -> None:
    model = Model(artifact, None)
    engines = find_format(artifact.manifest.format).engines
    perplexities = {name: perplexity(model, name) for name in engines if not lacks((find_engine(name).module,))}
    assert all(math.isfinite(value) for value in perplexities.values())
    assert max(perplexities.values()) < 1.03 * min(perplexities.values()), perplexities


FINEST = [(name, bits) for name, method in methods().items() for bits in [b for b in FINE if b in method.bits][:1]]


@pytest.mark.parametrize(("name", "bits"), FINEST)
def test_fine_bits_keep_the_model(name: str, bits: str, converted: Converted, one_block: Path) -> None:
    want = perplexity(open_model(str(one_block)), "reference", "float32")
    artifact = converted(name, bits)
    got = perplexity(Model(artifact, None), find_format(artifact.manifest.format).engines[0])
    assert got == pytest.approx(want, rel=0.02)
