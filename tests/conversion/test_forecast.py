"""Forecasts of memory, disk and time are near what real conversions take, and what does not fit is refused."""

import json
import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from gguf_files import slow_but
from killed import forked
from tiny_architectures import save_architecture
from tiny_models import CALIBRATION, CALIBRATION_FLAGS, prepare_job, quantkit

from quantkit.checkpoints.spool import CheckpointWriter
from quantkit.contracts.method import CheckedJob
from quantkit.contracts.run import Findings
from quantkit.conversion import check as checking
from quantkit.conversion import dry_run as trial
from quantkit.conversion.check import check
from quantkit.conversion.convert import convert, run
from quantkit.conversion.dry_run import dry_run
from quantkit.conversion.forecast import fit_memory, forecast, shapes_of
from quantkit.conversion.staging import refuse_small_disk
from quantkit.errors import OutputError, ResourceError
from quantkit.formats.gguf import writer
from quantkit.system.files import sha256_of
from quantkit.system.memory import peak_rss_bytes
from quantkit.system.progress import Progress
from quantkit.system.sizes import megabytes

M = 1_000_000
# A forecast may miss a measured peak by a quarter of what the work took, and by these bytes: libraries that are in
# memory already when the measurement begins, and freed memory that has gone back, or not yet.
ABOVE, BELOW = 40 * M, 80 * M

SMALL = {  # activations, Hessians and the embedding count
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 16384,
}  # fmt: skip
NARROW = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
WIDE = {**NARROW, "intermediate_size": 3072}  # the square of one layer's columns is most of what is in memory
WIDER = {**NARROW, "intermediate_size": 6144}
DEEP = {**NARROW, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}  # one layer is most
# Blocks are called with 4096 values of each token, which is sixteen times its hidden state.
BESIDE = {
    "hidden_size": 256, "num_hidden_layers": 16, "layer_types": ["sliding_attention", "full_attention"] * 8,
    "num_kv_shared_layers": 8, "hidden_size_per_layer_input": 256, "max_position_embeddings": 512,
}  # fmt: skip


def measure(warm, model, out, method, calibration, options):
    """In a process: convert `warm`, which loads the libraries; forecast and convert `model`; tell what it took.

    Standard error gets its size before, the forecast, and its peak, in bytes.
    """
    convert(warm, method, out=f"{out}-warm", calibration=CALIBRATION, **options)
    checked = check(prepare_job(model, method, calibration=calibration, **options), Path(out))
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is from now on
    run(checked)
    print("measured", before, checked.forecast.memory, peak_rss_bytes(), file=sys.stderr)


@pytest.mark.parametrize(
    ("method", "sizes", "options"),
    [
        ("rtn", SMALL, {}),
        ("gptq", WIDE, {}),
        ("awq", WIDE, {}),
        ("awq", WIDER, {"rounding": "nearest"}),
        ("int8", WIDE, {}),
        ("nf4", DEEP, {}),
        ("fp8", DEEP, {}),
        ("ctranslate2", SMALL, {}),
        ("gguf", WIDE, {"rounding": "gptq"}),
        ("gguf", WIDE, {"rounding": "gptq", "awq": True}),
        pytest.param("gptq", BESIDE, {}, marks=pytest.mark.slow),
    ],
)
def test_the_peak_is_as_forecast(method, sizes, options, tiny_with, tmp_path):
    warm, calibration = str(tiny_with(num_hidden_layers=1)), {**CALIBRATION, "sequences": 8, "length": 64}
    if sizes is BESIDE:
        model = save_architecture(tmp_path / "model", "gemma4", changes=BESIDE)
        calibration |= {"sequences": 32, "length": 256}
    else:
        model = tiny_with(**sizes)
    action = partial(measure, warm, str(model), str(tmp_path / "out"), method, calibration, options)
    told = forked(action, tmp_path / "log").wait(0)
    before, predicted, peak = map(int, told.rpartition("measured")[2].split())
    print(f"\nforecast {predicted / M:.0f} MB, measured {peak / M:.0f} MB, {before / M:.0f} MB before")
    taken = peak - before
    assert before + 0.75 * taken - ABOVE <= predicted <= before + 1.25 * taken + BELOW


def test_the_proof_of_ctranslate2_counts(one_block, tmp_path):
    assert check(prepare_job(str(one_block), "ctranslate2"), tmp_path / "out").forecast.phases["the proof"] > 0


def test_a_plain_gguf_has_no_forecast_of_memory_and_a_calibrated_one_is_refused(tiny, tmp_path):
    assert check(prepare_job(str(tiny), "gguf", max_memory_gb=0.01), tmp_path / "out").forecast is None
    job = prepare_job(str(tiny), "gguf", imatrix=True, calibration=CALIBRATION, max_memory_gb=0.01)
    with pytest.raises(ResourceError, match=r"gguf-Q4_K_M .*of tiny would need .* of memory .*the limit is 0\.01 GB"):
        check(job, tmp_path / "out")


def test_more_sequences_need_more_and_a_limit_makes_them_offload(tiny_with):
    def fitted(sequences, limit=None):
        calibration = {**CALIBRATION, "sequences": sequences, "length": 128}
        job = prepare_job(str(tiny_with(**SMALL)), "gptq", calibration=calibration, offload_gb=2.0)
        job, predicted = fit_memory(CheckedJob.of(replace(job, max_memory=limit), job.method.check(job)))
        assert predicted is not None
        return job, predicted

    (_, few), (job, many) = fitted(8), fitted(512)
    streams = 512 * 128 * 512 * 2 * 5 // 4
    assert many.memory - few.memory > 3 * streams  # between blocks, and residual and normed input within one
    assert (many.offloaded, job.offload_bytes) == (0, 2_000_000_000)
    shapes = shapes_of(job)
    now = forecast(job, shapes, job.method.peak_memory(job, shapes))  # the process may be smaller than before
    other, offloading = fitted(512, now.memory - streams // 2)
    assert other.offload_bytes == 0
    assert offloading.offloaded > streams
    assert offloading.memory < many.memory - streams
    with pytest.raises(ResourceError, match="Give fewer or shorter calibration sequences"):
        fitted(512, offloading.process + 1)


def test_offloading_changes_no_byte(two_blocks, tmp_path):
    for name, offload_gb in (("in_memory", 2.0), ("offloaded", 0.0)):
        convert(str(two_blocks), "gptq", out=tmp_path / name, calibration=CALIBRATION, offload_gb=offload_gb)
    for path in (tmp_path / "in_memory").iterdir():
        assert sha256_of(path) == sha256_of(tmp_path / "offloaded" / path.name), path.name


@pytest.mark.parametrize("method", ["rtn", "nf4"])
def test_a_checkpoint_is_on_the_disk_twice_at_the_end(method, tiny, tmp_path, monkeypatch):
    sizes = []
    plain = CheckpointWriter._write_shard

    def noted(writer, name, entries):
        plain(writer, name, entries)
        peak = sum(path.stat().st_size for path in writer._folder.rglob("*") if path.is_file())
        sizes.append((peak, (writer._folder / name).stat().st_size))

    monkeypatch.setattr(CheckpointWriter, "_write_shard", noted)
    job = prepare_job(str(tiny), method)
    run(check(job, tmp_path / method))
    [(peak, weights)] = sizes
    assert 1.9 * weights < peak <= check(job, tmp_path / "out").disk_bytes


@pytest.mark.parametrize(
    ("method", "bits", "options", "copies"),
    [
        ("rtn", "4", {}, 2),
        ("rtn", "4", {"group_size": 32}, 2),
        ("rtn", "4", {"format": "awq"}, 2),
        ("nf4", "4", {}, 2),
        ("float", "float32", {}, 2),
        ("gguf", "Q8_0", {}, 1),
        ("ctranslate2", "int8", {}, 1),
    ],
)
def test_disk_is_what_the_weights_take_as_often_as_they_are_there(method, bits, options, copies, tiny_with, tmp_path):
    job = prepare_job(str(tiny_with(**SMALL)), method, bits, **options)
    weights = run(check(job, tmp_path / "made")).manifest.weight_bytes
    disk = check(job, tmp_path / "out").disk_bytes
    others = 100 * M if copies == 2 else 0  # files that may come alongside weights
    assert 0.98 * copies * weights <= disk - others <= copies * (1.05 * weights + M)


def test_activations_of_a_calibrated_gguf_take_disk_as_they_grow(one_block, tmp_path):
    calibrations = ({**CALIBRATION, "sequences": number} for number in (2, 8))
    few, many = (
        check(prepare_job(str(one_block), "gguf", calibration=calibration, rounding="gptq"), tmp_path / "out")
        for calibration in calibrations
    )
    tokens, hidden = 6 * CALIBRATION["length"], 128
    assert many.disk_bytes - few.disk_bytes >= 2 * tokens * hidden * 2  # of two streams, in bfloat16


def test_a_disk_with_one_byte_too_few_is_refused(tmp_path, monkeypatch):
    free = 7_000_000
    monkeypatch.setattr("shutil.disk_usage", lambda _place: SimpleNamespace(total=free, used=0, free=free))
    # What unfinished work holds there is free for it.
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "tensors.spool").write_bytes(bytes(1000))
    for place, room in ((tmp_path / "not" / "made", free), (tmp_path / "out", free + 1000)):
        refuse_small_disk(place, room)
        with pytest.raises(OutputError, match=r"is too small: .* needed, .* free. Free space") as error:
            refuse_small_disk(place, room + 1)
        needed, there = str(error.value).split("too small: ")[1].split(" free")[0].split(" needed, ")
        assert needed != there


def test_a_gb_is_ten_to_the_ninth_wherever_it_is_asked_for(tiny, monkeypatch):
    seen = []

    def noted(job):
        seen.append((job.max_memory, job.offload_bytes))
        raise OutputError("enough")

    monkeypatch.setattr(checking, "fit_memory", noted)
    with pytest.raises(OutputError):
        convert(str(tiny), "gptq", max_memory_gb=2.5, offload_gb=1.5)
    for flags in ((), ("--dry-run",)):
        quantkit("convert", tiny, "--method", "gptq", "--max-memory-gb", 2.5, "--offload-gb", 1.5, *flags)
    assert seen == [(2_500_000_000, 1_500_000_000)] * 3
    assert CheckpointWriter.__init__.__defaults__ == (5_000_000_000,)  # of a shard
    shown = {0: "0.0 MB", 1_500_000: "1.5 MB", 999_900_000: "999.9 MB", 10**9: "1.00 GB", 1 << 30: "1.07 GB"}
    assert {value: megabytes(value) for value in shown} == shown


QUICK = ("rtn", "gptq", "gguf", "ctranslate2")


@pytest.mark.parametrize("method", slow_but(QUICK, [*QUICK, "awq", "nf4"]))
def test_a_dry_run_tells_and_writes_nothing(method, tiny, here, monkeypatch):
    packed = []
    monkeypatch.setattr(Findings, "count", lambda _findings, kind: packed.append(kind))
    monkeypatch.setattr(writer, "_threads", lambda: 1)
    monkeypatch.setattr("quantkit.methods.ctranslate2._prove", lambda *_: pytest.fail("proven"))
    ended = quantkit("convert", tiny, "--method", method, *CALIBRATION_FLAGS, "--dry-run", "--json", "f.json")
    assert (ended.code, ended.err) == (0, "")
    assert [path.name for path in here.iterdir()] == ["f.json"]
    values = json.loads((here / "f.json").read_text())
    assert values["disk_bytes"] > 0
    assert 0 < values["work_seconds"] < 60
    assert math.isfinite(values["before_seconds"])
    known = method != "gguf"
    assert (values["memory_bytes"] is not None) == known
    assert (re.search(r"[MG]B at the peak", ended.out) is not None) == known
    assert "time: about" in ended.out
    assert known or len(packed) == 1


def test_the_time_is_that_of_the_first_units_times_their_share(tiny, tmp_path, monkeypatch):
    """A thirtieth of 300 layers, which take one second and three in turn."""
    clock = [1000.0]

    def write(_job, run):
        for title, total, seconds, work in (("before", 10, [15.0] * 10, False), ("work", 300, [1.0, 3.0] * 150, True)):
            with run.progress.step(title, total, work=work) as advance:
                for each in seconds[: None if work else 1]:
                    clock.append(clock[-1] + each)
                    advance(1.0)

    monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=lambda: clock[-1]))
    job = prepare_job(str(tiny), "rtn")
    found = dry_run(check(replace(job, method=replace(job.method, write=write)), tmp_path / "out"))
    assert (found.before_seconds, found.work_seconds) == (15.0, pytest.approx(600.0))
    assert len(clock) == 1 + 1 + 10


@pytest.mark.parametrize(("method", "units"), [("rtn", 14), ("nf4", 14), ("gptq", 2), ("awq", 2), ("gguf", 20)])
def test_the_units_of_a_method_are_all_of_its_work(method, units, two_blocks, tmp_path):
    """A step that says too few or too many would make the forecast wrong by as much."""
    steps = {}
    progress = Progress(lambda step: steps.update({step.title: step}))
    convert(str(two_blocks), method, out=tmp_path / "out", calibration=CALIBRATION, progress=progress)
    [work] = [step for step in steps.values() if step.work]
    assert (work.total, work.done, work.ended) == (units, units, True)
