"""The forecast of memory and disk is near what real conversions take, and what does not fit is refused."""

import json
import math
import re
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from killed import forked
from tiny_architectures import save_architecture
from tiny_models import CALIBRATION, CALIBRATION_FLAGS, quantkit
from transformers import AutoConfig, AutoModelForCausalLM

from quantkit.calibration.tokens import tokens_of
from quantkit.checkpoints.writer import CheckpointWriter
from quantkit.contracts.method import Job, Shapes
from quantkit.conversion import convert as conversion
from quantkit.conversion import dry_run as trial
from quantkit.conversion.check import check, prepare_job
from quantkit.conversion.convert import convert, run
from quantkit.conversion.forecast import Forecast, fit_memory, forecast, shapes_of
from quantkit.conversion.staging import refuse_small_disk
from quantkit.errors import OutputError, ResourceError
from quantkit.report.table import megabytes
from quantkit.system.files import sha256_of

M, MIB = 1_000_000, 1 << 20
# Bytes that a measured peak may be above its forecast, and that a forecast may be above 1.25 times what was measured:
# libraries that are in memory already when the measurement begins, and freed memory that has gone back.
ABOVE, BELOW = 40 * M, 80 * M

SMALL = {  # activations, Hessians and the embedding count
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 16384,
}  # fmt: skip
NARROW = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
WIDE = {**NARROW, "intermediate_size": 3072}  # the square of one layer's columns is most of what is in memory
WIDER = {**NARROW, "intermediate_size": 6144}
DEEP = {**NARROW, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}  # one layer is most
FEW = {**CALIBRATION, "sequences": 8, "length": 64}
# Blocks are called with 4096 values of each token, which is sixteen times its hidden state.
BESIDE = {
    "hidden_size": 256, "num_hidden_layers": 16, "layer_types": ["sliding_attention", "full_attention"] * 8,
    "num_kv_shared_layers": 8, "hidden_size_per_layer_input": 256, "max_position_embeddings": 512,
}  # fmt: skip


def status(key: str) -> int:
    """Bytes, of this process."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{key}:")[2].split()[0])


@dataclass(frozen=True)
class Measured:
    """What a process does: convert `warm`, which loads the libraries; forecast and convert `model`; tell what it took.

    Standard error gets its size before, the forecast, and its peak, in bytes.
    """

    warm: str
    model: str
    out: str
    method: str
    calibration: dict[str, Any]
    options: dict[str, Any]

    def __call__(self) -> None:
        convert(self.warm, self.method, out=f"{self.out}-warm", calibration=CALIBRATION, **self.options)
        job = prepare_job(self.model, self.method, calibration=self.calibration, **self.options)
        checked = check(job, Path(self.out))
        assert checked.forecast is not None
        before = psutil.Process().memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is from now on
        run(checked, self.out)
        print("measured", before, checked.forecast.memory, status("VmHWM"), file=sys.stderr)


@pytest.mark.parametrize(
    ("method", "sizes", "options"),
    [
        ("rtn", SMALL, {}),
        ("gptq", WIDE, {}),
        ("awq", WIDER, {}),
        ("int8", WIDE, {}),
        ("nf4", DEEP, {}),
        ("fp8", DEEP, {}),
        ("ctranslate2", SMALL, {}),
        ("gguf", WIDE, {"rounding": "gptq"}),
        pytest.param("gptq", "beside", {}, marks=pytest.mark.slow),
    ],
)
def test_the_peak_is_as_forecast(
    method: str, sizes: dict[str, Any] | str, options: dict[str, Any], tiny_with: Callable[..., Path], tmp_path: Path
) -> None:
    calibration = FEW
    if isinstance(sizes, str):
        model = save_architecture(tmp_path / "model", "gemma4", changes=BESIDE)
        calibration = {**FEW, "sequences": 32, "length": 256}
    else:
        model = tiny_with(**sizes)
    warm = str(tiny_with(num_hidden_layers=1))
    child = forked(Measured(warm, str(model), str(tmp_path / "out"), method, calibration, options), tmp_path / "log")
    told = child.wait()
    assert child.code == 0, told
    before, predicted, peak = map(int, told.rpartition("measured")[2].split())
    print(f"\nforecast {predicted / M:.0f} MB, measured {peak / M:.0f} MB, {before / M:.0f} MB before")
    assert peak - ABOVE <= predicted <= before + 1.25 * (peak - before) + BELOW


# What grows with what

SHAPES = Shapes(
    block_parameters=50 * M, stages=((1_000, 1_000),), layers=((1_000, 1_000),), hidden=1_000, vocabulary=30_000,
    largest_outside=M, item_bytes=2, blocks=3,
)  # fmt: skip
ROWS = 40_000
LESS_TALL, TALL = ((ROWS, 1_000),), ((2 * ROWS, 1_000),)
BLOCK, MORE = {"block_parameters": 150 * M}, 100 * M
# Method and options, shapes and others, what those have more, and the bytes that one more of it takes at least.
GROWTH: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], int, int]] = {
    "a layer in float32": ("gptq", {}, {"layers": LESS_TALL}, {"layers": TALL}, ROWS * 1_000, 4),
    "outputs of 1024 tokens": ("gguf", {"imatrix": True}, {"stages": LESS_TALL}, {"stages": TALL}, ROWS, 4096),
    "what bitsandbytes makes of a layer": ("nf4", {}, {"layers": LESS_TALL}, {"layers": TALL}, ROWS * 1_000, 20),
    "parts that are joined": ("ctranslate2", {}, {"stages": LESS_TALL}, {"stages": TALL}, ROWS * 1_000, 8),
    # both blocks as stored, and in float32: weights and gradients; or weights, positions, their best and gradients
    "a tuned block": ("awq", {"refine": True}, {}, BLOCK, MORE, 4 + 8),
    "a refined block": ("gptq", {"refine": True, "tune_steps": 0}, {}, BLOCK, MORE, 4 + 16),
    # for each of 2000 tokens two hidden states of bfloat16, between blocks and within one
    "states of a token": ("gptq", {}, {}, {"states": 4}, 3 * 1_000, 2 * 2_000 * (2 + 4)),
    "values of the text": ("gptq", {}, {}, {"of_text": 300}, 300, 2 * 2_000),
}  # fmt: skip


def phases(model: Path, method: str, shapes: Shapes, **options: Any) -> dict[str, int]:
    """Of a job on 2000 tokens that may keep a GB of activations."""
    calibration = {**CALIBRATION, "sequences": 20, "length": 100}
    job = prepare_job(str(model), method, calibration=calibration, offload_gb=1.0, **options)
    tokens = tokens_of(job) if job.method.calibrated(job.options) else None
    return forecast(job.changed(checked=job.method.check(job), calibration=tokens), shapes).phases


@pytest.mark.parametrize("what", GROWTH)
def test_more_of_what_is_held_takes_as_much_more(what: str, tiny: Path) -> None:
    method, options, fewer, more, count, each = GROWTH[what]
    one, other = (phases(tiny, method, replace(SHAPES, **shapes), **options) for shapes in (fewer, more))
    assert count * each <= other["a decoder block"] - one["a decoder block"] <= 3 * count * each


# What decides


def test_what_does_not_fit_is_refused_with_the_figures(tiny: Path, tmp_path: Path) -> None:
    ended = quantkit(
        "convert", tiny, "--method", "gptq", "--out", tmp_path / "out", *CALIBRATION_FLAGS, "--max-memory-gb", 0.05
    )
    assert ended.code == 1
    # The process itself counts, and here it holds what other tests have left.
    assert re.match(r"error: ResourceError: gptq-4 of tiny would need \d+\.\d\d GB of memory", ended.err)
    assert "and the limit is 0.05 GB. " in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_plain_gguf_has_no_forecast_of_memory_and_a_calibrated_one_is_refused(tiny: Path, tmp_path: Path) -> None:
    assert check(prepare_job(str(tiny), "gguf"), tmp_path / "out", 10 * M).forecast is None
    job = prepare_job(str(tiny), "gguf", imatrix=True, calibration=CALIBRATION)
    with pytest.raises(ResourceError, match=r"gguf-Q4_K_M .*would need .* of memory"):
        check(job, tmp_path / "out", 10 * M)


def test_more_sequences_need_more_and_a_limit_makes_them_offload(tiny_with: Callable[..., Path]) -> None:
    def fitted(sequences: int, limit: int | None = None) -> tuple[Job, Forecast]:
        calibration = {**CALIBRATION, "sequences": sequences, "length": 128}
        job = prepare_job(str(tiny_with(**SMALL)), "gptq", calibration=calibration, offload_gb=2.0)
        job, predicted = fit_memory(job.changed(checked=job.method.check(job)), limit)
        assert predicted is not None
        return job, predicted

    (_, few), (job, many) = fitted(8), fitted(512)
    streams = 512 * 128 * 512 * 2 * 5 // 4
    assert many.memory - few.memory > 3 * streams  # between blocks, and residual and normed input within one
    assert (many.offloaded, job.offload_bytes) == (0, 2_000_000_000)
    now = forecast(job, shapes_of(job))  # the process may be smaller than before
    other, offloading = fitted(512, now.memory - streams // 2)
    assert other.offload_bytes == 0
    assert offloading.offloaded > streams
    assert offloading.memory < many.memory - streams
    with pytest.raises(ResourceError, match="Give fewer or shorter calibration sequences"):
        fitted(512, offloading.process + 1)


def test_offloading_changes_no_byte(tiny_with: Callable[..., Path], tmp_path: Path) -> None:
    model = str(tiny_with(num_hidden_layers=2))
    for name, offload_gb in (("in_memory", 2.0), ("offloaded", 0.0)):
        convert(model, "gptq", out=tmp_path / name, calibration=CALIBRATION, offload_gb=offload_gb)
    for path in (tmp_path / "in_memory").iterdir():
        assert sha256_of(path) == sha256_of(tmp_path / "offloaded" / path.name), path.name


# The disk. Checkpoints of 0.4 billion weights and more, of which only the headers are there.

SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
VOCABULARY = 32000 * 4096
LINEAR = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
DENSE = 2 * VOCABULARY + (2 * 2 + 1) * 4096
GROUPS = LINEAR // 128
G_IDX = 2 * (6 * 4096 + 11008) * 4


@pytest.fixture(scope="module")
def large(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The headers of a checkpoint with so many blocks."""

    def save(blocks: int) -> Path:
        folder = tmp_path_factory.mktemp("models") / f"large{blocks}"
        folder.mkdir()
        for path in tiny.iterdir():
            if path.suffix == ".json":
                (folder / path.name).write_bytes(path.read_bytes())
        changed = {**SIZES, "num_key_value_heads": 32, "head_dim": 128, "tie_word_embeddings": False}
        config = json.loads((folder / "config.json").read_text()) | changed | {"num_hidden_layers": blocks}
        (folder / "config.json").write_text(json.dumps(config))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        header, end = {}, 0
        for name, value in model.state_dict().items():
            header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [end, end + 2 * value.numel()]}
            end += 2 * value.numel()
        text = json.dumps(header).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        return folder

    return save


# method, bits, options, and the bytes of the artifact's weights by its layout; a checkpoint is there twice at the end
DISK: dict[str, tuple[str, str, dict[str, Any], float, int]] = {
    "gptq's layout": ("rtn", "4", {}, LINEAR / 2 + GROUPS * 2.5 + G_IDX + 2 * DENSE, 2),
    "groups of 32": ("rtn", "4", {"group_size": 32}, LINEAR / 2 + 4 * GROUPS * 2.5 + G_IDX + 2 * DENSE, 2),
    "awq's layout": ("rtn", "4", {"format": "awq"}, LINEAR / 2 + GROUPS * 2.5 + 2 * DENSE, 2),
    "nf4": ("nf4", "4", {"double_quant": False}, LINEAR / 2 + LINEAR / 64 * 4 + 2 * DENSE, 2),
    "float32": ("float", "float32", {}, 4 * (LINEAR + DENSE), 2),
    "gguf, Q8_0": ("gguf", "Q8_0", {}, (LINEAR + DENSE) * 34 / 32, 1),
    "ctranslate2, int8": ("ctranslate2", "int8", {}, LINEAR + DENSE, 1),
}  # fmt: skip
# What a forecast may be above them, and what may come beside the weights.
SHARE, OTHERS = 0.03, 50 * M


def test_disk_is_what_the_layout_takes_as_often_as_it_is_there(large: Callable[[int], Path], tmp_path: Path) -> None:
    model = str(large(2))
    for case, (method, bits, options, weights, copies) in DISK.items():
        disk = check(prepare_job(model, method, bits, **options), tmp_path / "out").disk_bytes
        assert copies * weights <= disk <= copies * (weights * (1 + SHARE) + OTHERS), case
    # Q4_K takes 4.5 bits, Q6_K 6.5625: half of the values' and down projections', and the head. Activations wait, and
    # with error feedback packed blocks do.
    plain = check(prepare_job(model, "gguf", "Q4_K_M"), tmp_path / "out").disk_bytes
    calibration = {**CALIBRATION, "sequences": 16, "length": 64}
    for options, spooled, flows in (({"imatrix": True}, 0, 1), ({"rounding": "gptq"}, 1, 2)):
        job = prepare_job(model, "gguf", "Q4_K_M", calibration=calibration, **options)
        more = check(job, tmp_path / "out").disk_bytes - plain
        assert more >= spooled * LINEAR * 4.5 / 8 + flows * 16 * 64 * 4096 * 2
        assert more <= spooled * LINEAR * 6.6 / 8 + flows * 16 * 64 * 2 * (4096 + 2 * 4096 + 3 * 4096)


def test_the_proof_of_a_large_model_takes_its_first_blocks(large: Callable[[int], Path]) -> None:
    """Half a billion weights are enough, however many blocks follow; the engine holds them in float32."""
    proofs = []
    for blocks in (2, 3):
        job = prepare_job(str(large(blocks)), "ctranslate2")
        job = job.changed(checked=job.method.check(job))
        proofs.append(forecast(job, shapes_of(job)).phases["the proof"])
    assert proofs[0] > 4 * (2 * VOCABULARY + LINEAR // 2)
    assert proofs[1] == pytest.approx(proofs[0], rel=1e-3)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("method", ["rtn", "nf4"])
def test_a_checkpoint_is_on_the_disk_twice_at_the_end(
    method: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []
    plain = CheckpointWriter._write_shard

    def noted(writer: CheckpointWriter, name: str, entries: Any) -> None:
        plain(writer, name, entries)
        sizes.append((bytes_in(writer._folder), (writer._folder / name).stat().st_size))

    monkeypatch.setattr(CheckpointWriter, "_write_shard", noted)
    job = prepare_job(str(tiny), method)
    run(job, tmp_path / method)
    [(peak, weights)] = sizes
    assert 1.9 * weights < peak <= check(job, tmp_path / "out").disk_bytes


def test_a_disk_with_one_byte_too_few_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 7_000_000
    monkeypatch.setattr("shutil.disk_usage", lambda _place: SimpleNamespace(total=free, used=0, free=free))
    refuse_small_disk(tmp_path / "not" / "made", free)
    with pytest.raises(OutputError, match=r"is too small: .* needed, .* free. Free some space") as error:
        refuse_small_disk(tmp_path / "not" / "made", free + 1)
    needed, there = str(error.value).split("too small: ")[1].split(" free")[0].split(" needed, ")
    assert needed != there
    # What unfinished work holds there is free for it.
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "tensors.spool").write_bytes(bytes(1000))
    refuse_small_disk(tmp_path / "out", free + 1000)
    with pytest.raises(OutputError, match="too small"):
        refuse_small_disk(tmp_path / "out", free + 1001)


# A GB has 10^9 bytes.


class Stop(Exception):  # noqa: N818 - a signal, not an error
    """Ends a conversion at its check."""


def test_a_gb_is_ten_to_the_ninth_wherever_it_is_asked_for(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int | None, int]] = []

    def noted(job: Job, _out: Path, limit: int | None = None) -> None:
        seen.append((limit, job.offload_bytes))
        raise Stop

    for module in (conversion, trial):
        monkeypatch.setattr(module, "check", noted)
    with pytest.raises(Stop):
        convert(str(tiny), "gptq", max_memory_gb=2.5, offload_gb=1.5)
    for flags in ((), ("--dry-run",)):
        with pytest.raises(Stop):
            quantkit("convert", tiny, "--method", "gptq", "--max-memory-gb", 2.5, "--offload-gb", 1.5, *flags)
    assert seen == [(2_500_000_000, 1_500_000_000)] * 3
    assert CheckpointWriter.__init__.__defaults__ == (5_000_000_000,)  # of a shard
    shown = {0: "0.0 MB", 1_500_000: "1.5 MB", 999_900_000: "999.9 MB", 10**9: "1.00 GB", 1 << 30: "1.07 GB"}
    assert {value: megabytes(value) for value in shown} == shown


def test_what_is_printed_is_what_was_forecast(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_measure", lambda _job: (15.0, 600.0))
    flags = ("--out", tmp_path / "out", "--dry-run", "--json", tmp_path / "f.json")
    ended = quantkit("convert", tiny, "--method", "gptq", *CALIBRATION_FLAGS, *flags)
    values = json.loads((tmp_path / "f.json").read_text())
    assert (values["before_seconds"], values["work_seconds"]) == (15.0, 600.0)
    assert "time: about 10.2 minutes" in ended.out
    process = values["memory_bytes"] - max(values["phases_bytes"].values())
    assert math.isclose(process, psutil.Process().memory_info().rss, rel_tol=0.5)
    assert f"memory: {megabytes(values['memory_bytes'])} at the peak ({megabytes(process)} for the process" in ended.out
    assert f"disk: {megabytes(values['disk_bytes'])} at most" in ended.out
