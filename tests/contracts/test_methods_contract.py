"""What holds for every registered method: its artifact opens, verifies, covers its source, and runs in its engines."""

import math
from pathlib import Path

import pytest
import torch
from tiny_models import CALIBRATION, SAMPLE, save_tiny
from trials import dense

from quantkit.artifact import Artifact, open_artifact
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.probe import ProbeJob
from quantkit.contracts.registry import find_engine, find_format, find_method, find_probe, methods
from quantkit.contracts.stored import open_stored, stored_values
from quantkit.conversion.convert import convert
from quantkit.conversion.verify import verify
from quantkit.data.texts import load_text
from quantkit.evaluation.engine_choice import refusal
from quantkit.evaluation.protocols import cut
from quantkit.formats.source import open_model, open_source
from quantkit.progress import Progress
from quantkit.recipe import EvaluationSpec
from quantkit.system.modules import lacks

# Bits that hardly change a model, in the words of the methods that have them.
FINE = {"8", "int8", "int16", "float16", "Q8_0"}
N_CTX = 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def made(model: Path, method: str, bits: str | None, folder: Path) -> Artifact:
    """The artifact of a method at its default options; of one that keeps codes, after they were rounded."""
    if method == "keep":
        model = convert(str(model), "rtn", bits, folder / "rounded").folder
    return convert(str(model), method, bits, folder / "made", calibration=CALIBRATION)


@pytest.fixture(scope="module", params=methods())
def artifact(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The artifact of each method, at its default bits and options."""
    return made(tiny, request.param, None, tmp_path_factory.mktemp("out"))


def perplexity(model: Model, engine: str, dtype: str | None = None) -> float:
    """Measured in this process by the engine `engine` on two windows."""
    spec = EvaluationSpec(text=str(SAMPLE), n_ctx=N_CTX, limit=2)
    windows = cut(load_text(spec.text, "evaluation"), model.tokenizer(), spec.protocol, N_CTX, spec.limit)
    assert refusal(find_engine(engine), model) is None
    loaded = find_engine(engine).load(model, LoadSpec(threads=1, n_ctx=N_CTX, dtype=dtype))
    job = ProbeJob(loaded, model, spec, 1, windows, Progress())
    [measurement] = find_probe("perplexity").run(job)
    return measurement.value


def test_it_opens_and_verifies(artifact: Artifact) -> None:
    opened = open_artifact(artifact.folder)
    assert opened == artifact
    method = find_method(opened.manifest.recipe.method)
    assert opened.manifest.recipe.bits == method.default_bits
    assert verify(opened) == artifact
    assert sum(opened.manifest.tensor_types.values()) >= 21


def test_it_reads_back_every_tensor_of_the_source(artifact: Artifact, tiny: Path) -> None:
    source = open_source(str(tiny))
    shapes = {}
    for name, stored in stored_values(open_stored(artifact, find_format(artifact.manifest.format))):
        assert name not in shapes, name
        value = dense(stored)
        assert bool(torch.isfinite(value).all()), name
        shapes[name] = tuple(value.shape)
    assert shapes == {name: info.shape for name, info in source.tensors.items()}


def test_its_engines_agree(artifact: Artifact, tiny: Path) -> None:
    model = Model(artifact, None)
    engines = find_format(artifact.manifest.format).engines
    perplexities = {name: perplexity(model, name) for name in engines if not lacks((find_engine(name).module,))}
    print(artifact.label, perplexities)
    assert all(math.isfinite(value) for value in perplexities.values())
    assert max(perplexities.values()) < 1.03 * min(perplexities.values()), perplexities


@pytest.mark.parametrize("name", [name for name, method in methods().items() if FINE.intersection(method.bits)])
def test_fine_bits_keep_the_model(name: str, tiny: Path, tmp_path: Path) -> None:
    want = perplexity(open_model(str(tiny)), "transformers", "float32")
    for bits in sorted(FINE.intersection(find_method(name).bits)):
        artifact = made(tiny, name, bits, tmp_path / bits)
        got = perplexity(Model(artifact, None), find_format(artifact.manifest.format).engines[0])
        print(name, bits, got, want)
        assert got == pytest.approx(want, rel=0.02), bits
