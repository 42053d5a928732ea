"""The forecast: near what a real conversion takes, and refused where it does not fit."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_architectures import save_architecture
from tiny_models import CALIBRATION, CALIBRATION_FLAGS, quantkit, save_tiny

from quantkit.contracts.method import Job
from quantkit.conversion.check import prepare_job
from quantkit.conversion.convert import convert
from quantkit.conversion.forecast import Forecast, fit_memory, forecast, shapes_of
from quantkit.errors import ResourceError
from quantkit.system.files import sha256_of

WITHIN = 0.15
# A process of its own: imports, check with forecast, conversion, and the system's own word on its peak.
MEASURED = """
import sys
from pathlib import Path
import torch
from quantkit.conversion.check import check, prepare_job
from quantkit.conversion.convert import run
torch.set_num_threads(1)
model, method, text, out = sys.argv[1:]
job = prepare_job(model, method, calibration={"text": text, "sequences": 32, "length": 256})
checked = check(job, Path(out))
run(checked, out)
[peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
print(checked.forecast.memory, int(peak.split()[1]) * 1024)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that activations, Hessians and the embedding count."""
    return save_tiny(
        tmp_path_factory.mktemp("models") / "small",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=16384,
    )


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The square of one layer's columns is most of what is in memory."""
    shapes = {"hidden_size": 128, "intermediate_size": 3072, "num_attention_heads": 2, "num_key_value_heads": 1}
    return save_tiny(tmp_path_factory.mktemp("models") / "wide", num_hidden_layers=1, **shapes)


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks are called with 4096 values of each token, which is sixteen times its hidden state."""
    changes = {
        "hidden_size": 256,
        "num_hidden_layers": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 8,
        "num_kv_shared_layers": 8,
        "hidden_size_per_layer_input": 256,
        "max_position_embeddings": 512,
    }
    return save_architecture(tmp_path_factory.mktemp("models") / "beside", "gemma4", changes=changes)


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("gptq", "beside"),
        *(("rtn", "small"), ("gptq", "small"), ("awq", "small"), ("gptq", "wide"), ("int8", "small")),
        *(("nf4", "small"), ("ctranslate2", "small")),
    ],
)
def test_the_peak_is_as_forecast(method: str, model: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(model)
    command = [sys.executable, "-c", MEASURED, str(folder), method, str(CALIBRATION["text"]), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    predicted, measured = map(int, done.stdout.split())
    print(f"\nforecast {predicted / 1e6:.0f} MB, measured {measured / 1e6:.0f} MB")
    assert predicted == pytest.approx(measured, rel=WITHIN)


def test_what_does_not_fit_is_refused_with_the_figures(tiny: Path, tmp_path: Path) -> None:
    ended = quantkit(
        "convert", tiny, "--method", "gptq", "--out", tmp_path / "out", *CALIBRATION_FLAGS, "--max-memory-gb", 0.05
    )
    assert ended.code == 1
    # The process itself counts, and here it holds what other tests have left.
    assert re.match(r"error: ResourceError: gptq-4 of tiny would need \d+\.\d\d GB of memory", ended.err)
    assert "and the limit is 0.05 GB. " in ended.err
    assert list(tmp_path.iterdir()) == []


def test_more_sequences_need_more_and_a_limit_makes_them_offload(small: Path) -> None:
    def checked(sequences: int) -> Job:
        calibration = {**CALIBRATION, "sequences": sequences, "length": 128}
        job = prepare_job(str(small), "gptq", calibration=calibration, offload_gb=2.0)
        return job.changed(checked=job.method.check(job))

    def fitted(sequences: int, limit: int | None = None) -> tuple[Job, Forecast]:
        job, predicted = fit_memory(checked(sequences), limit)
        assert predicted is not None
        return job, predicted

    (_, few), (job, many) = fitted(8), fitted(512)
    streams = 512 * 128 * 512 * 2 * 5 // 4
    assert many.memory - few.memory > streams
    assert (many.offloaded, job.offload_bytes) == (0, 2_000_000_000)
    now = forecast(job, shapes_of(job))  # the process may be smaller than before
    other, offloading = fitted(512, now.memory - streams // 2)
    assert other.offload_bytes == 0
    assert offloading.offloaded > streams
    assert offloading.memory < many.memory - streams
    with pytest.raises(ResourceError, match="Give fewer or shorter calibration sequences"):
        fitted(512, offloading.process + 1)


def test_offloading_changes_no_byte(tiny: Path, tmp_path: Path) -> None:
    for name, offload_gb in (("in_memory", 2.0), ("offloaded", 0.0)):
        convert(str(tiny), "gptq", out=tmp_path / name, calibration=CALIBRATION, offload_gb=offload_gb)
    for path in (tmp_path / "in_memory").iterdir():
        assert sha256_of(path) == sha256_of(tmp_path / "offloaded" / path.name), path.name


def phases_of(job: Job) -> dict[str, int]:
    """The phases as a fresh copy of the module forecasts them, with the constants that other modules have now."""
    spec = importlib.util.find_spec("quantkit.conversion.forecast")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    phases: dict[str, int] = module.forecast(job, module.shapes_of(job)).phases
    return phases


@pytest.mark.parametrize(
    ("home", "phase"),
    [("models.source.SLAB_BYTES", "reading the source"), ("conversion.prove.PIECE", "reading back")],
)
def test_sizes_of_pieces_are_those_that_are_read(
    home: str, phase: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare_job(str(tiny), "rtn")
    job = job.changed(checked=job.method.check(job))
    before = phases_of(job)
    monkeypatch.setattr(f"quantkit.{home}", 1000)
    after = phases_of(job)
    assert after[phase] < before[phase]
    assert {name: size for name, size in after.items() if name != phase} == {
        name: size for name, size in before.items() if name != phase
    }
