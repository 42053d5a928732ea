"""A dry run: forecasts from the first units of the work, and nothing is written."""

import json
import math
import re
from pathlib import Path

import pytest
from tiny_models import CALIBRATION_FLAGS, quantkit, save_tiny

from quantkit.contracts.method import Job
from quantkit.contracts.run import Findings
from quantkit.conversion.check import prepare_job
from quantkit.conversion.convert import run
from quantkit.conversion.dry_run import dry_run
from quantkit.formats.gguf import writer

FORECAST = ("rtn", "gptq", "awq")  # methods that say what memory they take


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "nf4", "float", "gguf", "ctranslate2"])
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
    known = method in FORECAST
    assert (values["memory_bytes"] is not None) == known
    assert (re.search(r"[MG]B at the peak", ended.out) is not None) == known
    assert "time: about" in ended.out


def test_a_dry_run_of_gguf_packs_a_few_tensors_only(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[str] = []
    count = Findings.count

    def noted(findings: Findings, tensor_type: str) -> None:
        packed.append(tensor_type)
        count(findings, tensor_type)

    monkeypatch.setattr(Findings, "count", noted)
    monkeypatch.setattr(writer, "_threads", lambda: 1)
    job: Job = prepare_job(str(tiny), "gguf")
    trial = dry_run(job, tmp_path / "out")
    assert len(packed) == 1
    assert trial.work_seconds > 0
    assert not (tmp_path / "out").exists()
    packed.clear()
    run(job, tmp_path / "out")
    assert len(packed) == 29


def test_a_dry_run_of_ctranslate2_converts_and_proves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.methods.ctranslate2._prove", lambda *_: pytest.fail("proven"))
    trial = dry_run(prepare_job(str(tiny), "ctranslate2"), tmp_path / "out")
    assert trial.work_seconds > 0
    assert (trial.forecast, trial.out) == (None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
