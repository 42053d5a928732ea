"""The forecast: near what a real conversion takes, refused where it does not fit, and nothing written by a dry run."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import CALIBRATION, CALIBRATION_FLAGS, quantkit, save_tiny

from quantkit.conversion import convert as conversion
from quantkit.conversion import forecast
from quantkit.conversion.convert import convert
from quantkit.errors import ResourceError
from quantkit.system.files import sha256_of

WITHIN = 0.15
# A process of its own: imports, check with forecast, conversion, and the system's own word on its peak.
MEASURED = """
import sys
from pathlib import Path
import torch
from quantkit import conversion
torch.set_num_threads(1)
model, method, text, out = sys.argv[1:]
calibration = {"text": text, "sequences": 32, "length": 256}
forecasts = []
plain = conversion.check
conversion.check = lambda *arguments: forecasts.append(plain(*arguments))
conversion.convert(model, method, out=out, calibration=calibration)
[peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
print(forecasts[0].memory, int(peak.split()[1]) * 1024)
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


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_the_peak_is_as_forecast(method: str, small: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURED, str(small), method, str(CALIBRATION["text"]), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    predicted, measured = map(int, done.stdout.split())
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


def test_more_sequences_need_more_and_a_limit_makes_them_spill(small: Path) -> None:
    def asked(sequences: int) -> conversion.Job:
        calibration = {**CALIBRATION, "sequences": sequences, "length": 128}
        job = conversion.asked(str(small), "gptq", calibration=calibration, offload_gb=2.0)
        conversion.find_method("gptq").check(job)
        return job

    few, many = (forecast.fit_memory(asked(sequences)) for sequences in (8, 512))
    assert few is not None
    assert many is not None
    streams = 512 * 128 * 512 * 2 * 5 // 4
    assert many.memory - few.memory > streams
    job = asked(512)
    now = forecast.forecast(job)  # the process may be smaller than before
    assert now is not None
    spilled = forecast.fit_memory(job, now.memory - streams // 2)
    assert spilled is not None
    assert (many.spilled, job.spill_bytes) == (0, 0)
    assert spilled.spilled > streams
    assert spilled.memory < many.memory - streams
    with pytest.raises(ResourceError, match="Give fewer or shorter calibration sequences"):
        forecast.fit_memory(asked(512), spilled.process + 1)


def test_spilling_changes_no_byte(tiny: Path, tmp_path: Path) -> None:
    for name, offload_gb in (("kept", 2.0), ("spilled", 0.0)):
        convert(str(tiny), "gptq", out=tmp_path / name, calibration=CALIBRATION, offload_gb=offload_gb)
    for path in (tmp_path / "kept").iterdir():
        assert sha256_of(path) == sha256_of(tmp_path / "spilled" / path.name), path.name


def test_the_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "CGROUP", tmp_path)
    machine = forecast.available_memory()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 300\nactive_file 100\n")
    assert forecast.available_memory() == pytest.approx(machine, rel=0.2)
    (tmp_path / "memory.max").write_text("5000\n")
    assert forecast.available_memory() == 5000 - 600
    (tmp_path / "memory.max").write_text("500\n")
    assert forecast.available_memory() == 0


@pytest.mark.parametrize("method", ["rtn", "gptq", "gguf"])
def test_a_dry_run_tells_and_writes_nothing(
    method: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = quantkit("convert", tiny, "--method", method, *CALIBRATION_FLAGS, "--dry-run", "--json", "f.json")
    assert (ended.code, ended.err) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"]
    values = json.loads((tmp_path / "f.json").read_text())
    assert values["disk_bytes"] > 0
    assert 0 < values["work_seconds"] < 60
    assert math.isfinite(values["before_seconds"])
    known = method != "gguf"
    assert (values["memory_bytes"] is not None) == known
    assert (re.search(r"[MG]B at the peak", ended.out) is not None) == known
    assert "time: about" in ended.out
