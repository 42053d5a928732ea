"""What a forecast is made of, by hand: memory of tall and of wide layers, bytes on the disk, and what a GB is."""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import CALIBRATION, CALIBRATION_FLAGS, quantkit, save_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from quantkit.calibration.scale_tuning import tuning_bytes
from quantkit.calibration.tokens import tokens_of
from quantkit.checkpoints.writer import CheckpointWriter
from quantkit.contracts.method import Job, Shapes
from quantkit.conversion import convert as conversion
from quantkit.conversion import dry_run as trial
from quantkit.conversion.check import check, prepare_job
from quantkit.conversion.convert import convert
from quantkit.conversion.forecast import forecast, shapes_of
from quantkit.conversion.staging import refuse_small_disk
from quantkit.errors import OutputError, ResourceError
from quantkit.methods import gguf
from quantkit.report.table import megabytes

M, MIB = 1_000_000, 1 << 20
TOKENS = 20 * 100
ROWS = ((1_000, 1_000),)
TALL = Shapes(
    block_parameters=50 * M, stages=((40_000, 1_000), *ROWS), layers=((40_000, 1_000), *ROWS), hidden=1_000,
    vocabulary=30_000, largest_outside=30 * M, item_bytes=2, blocks=3,
)  # fmt: skip
WIDE = Shapes(
    block_parameters=50 * M, stages=((1_000, 40_000), *ROWS), layers=((1_000, 40_000), *ROWS), hidden=1_000,
    vocabulary=30_000, largest_outside=30 * M, item_bytes=2, blocks=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=1)


def phases(tiny: Path, method: str, shapes: Shapes, **options: Any) -> dict[str, int]:
    """Of a job on 2000 tokens that may keep a GB of activations."""
    calibration = {**CALIBRATION, "sequences": 20, "length": 100}
    job = prepare_job(str(tiny), method, calibration=calibration, offload_gb=1.0, **options)
    tokens = tokens_of(job) if job.method.calibrated(job.options) else None
    job = job.changed(checked=job.method.check(job), calibration=tokens)
    return forecast(job, shapes).phases


# Bytes that the forward pass of 1024 tokens takes: 4 a row of the tallest stage, 8 a hidden channel, 4 a column of the
# widest; half of it stays in the allocator beside larger work. 24 MB are freed memory that has not gone back.
FORWARD = 1024 * (4 * 40_000 + 8 * 1_000 + 4 * 1_000)
BESIDE = FORWARD // 2 + 24 * M
# Two streams: 2000 tokens are too few for less than all of them to go through the unquantized blocks, too.
STREAMS = 2 * TOKENS * 1_000 * 2
BLOCKS = 2 * 50 * M * 2
# Inside a block each token holds residual and normed input, and what attention takes, or the widest layer.
WAITING_TALL, WAITING_WIDE = 2 * TOKENS * (2_000 + 3_000) * 2, 2 * TOKENS * (2_000 + 40_000) * 2
# GPTQ: six squares of float32, or four beside a layer and what is worked on of it at a time, nine slabs.
GPTQ_WIDE = 6 * 4 * 40_000**2
GPTQ_TALL = 4 * 4 * 1_000**2 + 4 * 40 * M + 9 * 4 * (16 * MIB)
# AWQ: every Hessian twice, the block in float32, ten copies of the largest layer.
AWQ_WIDE = 2 * 4 * (40_000**2 + 1_000**2) + 4 * 50 * M + 10 * 4 * 40 * M
AWQ_TALL = 2 * 4 * (1_000**2 + 1_000**2) + 4 * 50 * M + 10 * 4 * 40 * M
CASES = {
    "rtn, tall": ("rtn", TALL, 10 * 4 * 40 * M, 0),
    "rtn, wide": ("rtn", WIDE, 10 * 4 * 40 * M, 0),
    "gptq, tall": ("gptq", TALL, GPTQ_TALL, STREAMS + WAITING_TALL + BLOCKS + BESIDE),
    "gptq, wide": ("gptq", WIDE, GPTQ_WIDE, STREAMS + WAITING_WIDE + BLOCKS + BESIDE),
    "awq, tall": ("awq", TALL, AWQ_TALL, STREAMS // 2 + BLOCKS // 2 + BESIDE),
    "awq, wide": ("awq", WIDE, AWQ_WIDE, STREAMS // 2 + BLOCKS // 2 + BESIDE),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_of_tall_and_of_wide_layers(case: str, tiny: Path) -> None:
    method, shapes, work, beside = CASES[case]
    assert FORWARD == 1024 * (4 * 1_000 + 8 * 1_000 + 4 * 40_000)  # alike for both
    streams = {"rtn": 0, "gptq": STREAMS, "awq": STREAMS // 2}[method]
    outside = 30 * M * (2 + 2)
    assert phases(tiny, method, shapes) == {
        # The rows of tokens that occur, 2000 at most: as stored twice, and in bfloat16.
        "embedding the text": streams + 2_000 * 1_000 * (2 * 2 + 2) if streams else 0,
        "a decoder block": work + beside,
        "the largest tensor": outside + work // 2,
        "reading back": max(outside, 40 * M * 12) + 14 * MIB + work // 2,
        "reading the source": 7 * 4 * MIB // 2,
    }


def test_memory_of_what_flows_beside_a_hidden_state(tiny: Path) -> None:
    """Four of them side by side, 300 values of the text for the three blocks, which both streams have once."""
    beside = Shapes(**{**vars(TALL), "states": 4, "of_text": 300, "shared": 50})
    made = phases(tiny, "gptq", beside)
    streams = TOKENS * (2 * (4 * 1_000 + 50) + 300) * 2
    assert made["embedding the text"] == streams + 2_000 * 1_300 * (2 * 2 + 2)
    forward = FORWARD + 1024 * 8 * 3_000
    waiting = WAITING_TALL + 2 * TOKENS * (6_000 + 100) * 2
    assert made["a decoder block"] == streams + waiting + BLOCKS + GPTQ_TALL + forward // 2 + 24 * M


def test_memory_of_what_is_learned(tiny: Path) -> None:
    flows = 3 * 2048 * 1_000 * 2
    head = 30_000 * (1_000 * 2 + 256 * 2 * 3)
    graph = 1024 * (12 * 1_000 + 6 * 1_000) * 2
    assert tuning_bytes(TALL) == flows + head + graph + 8 * 50 * M + 12 * 40 * M
    refined = phases(tiny, "gptq", TALL, refine=True, tune_steps=0)["a decoder block"]
    assert refined == 24 * 50 * M + STREAMS + WAITING_TALL + BLOCKS + BESIDE
    tuned = phases(tiny, "awq", WIDE, refine=True)["a decoder block"]
    assert tuned == max(AWQ_WIDE, tuning_bytes(WIDE)) + STREAMS + BLOCKS + BESIDE


def test_memory_of_a_calibrated_gguf(tiny: Path) -> None:
    """With an importance the squares of a batch, with error feedback what GPTQ takes; a target is estimated before."""
    weighted = phases(tiny, "gguf", WIDE, imatrix=True)
    squares = 2 * 4 * 1024 * 40_000
    both = max(FORWARD, squares) + min(FORWARD, squares) // 2
    assert weighted["a decoder block"] == STREAMS // 2 + BLOCKS // 2 + both + 24 * M
    fed = phases(tiny, "gguf", WIDE, bits="Q4_K_M", rounding="gptq")
    assert fed["a decoder block"] == phases(tiny, "gptq", WIDE)["a decoder block"]
    assert "measuring sensitivities" not in fed
    chosen = phases(tiny, "gguf", TALL, bits="auto", target_bpw=6)
    # 1600 tokens: a block in bfloat16 twice, inputs and gradients of its layers, and the widest products or one layer.
    layers = 2 * 1_600 * (41_000 + 2_000)
    passing = 4 * 1_600 * (4 * 40_000 + 8 * 1_000 + 4 * 1_000)
    # The head in bfloat16 and a change of it, once in float32, and logits of 256 tokens ten times.
    assert chosen["the head's gradients"] == (2 + 2 + 4) * 30 * M + 10 * 4 * 256 * 30_000
    assert chosen["measuring sensitivities"] == 2 * 2 * 50 * M + layers + max(passing, 10 * 4 * 40 * M)


def test_a_plain_gguf_has_no_forecast_of_memory_and_a_calibrated_one_is_refused(tiny: Path, tmp_path: Path) -> None:
    plain = check(prepare_job(str(tiny), "gguf"), tmp_path / "out", 10 * M)
    assert plain.forecast is None
    job = prepare_job(str(tiny), "gguf", imatrix=True, calibration=CALIBRATION)
    with pytest.raises(ResourceError, match=r"gguf-Q4_K_M .*would need .* of memory"):
        check(job, tmp_path / "out", 10 * M)


def test_memory_of_nf4_is_that_of_one_layer(tiny: Path) -> None:
    """As stored, and bitsandbytes' copies of it."""
    work = (2 + 18) * 40 * M
    for shapes in (TALL, WIDE):
        made = phases(tiny, "nf4", shapes)
        assert made["a decoder block"] == work
        assert made["the largest tensor"] == 30 * M * (2 + 2) + work // 2
    more = Shapes(**{**vars(TALL), "blocks": 300})
    assert phases(tiny, "nf4", more) == phases(tiny, "nf4", TALL)


@pytest.mark.parametrize(("bits", "at_once"), [("int8", 4 * MIB), ("int16", 40 * M), ("float32", 4 * MIB)])
def test_memory_of_ctranslate2_is_that_of_one_variable_and_of_the_proof(bits: str, at_once: int, tiny: Path) -> None:
    """Layers that share their inputs are joined, twice there as stored; int16 is made of a whole variable."""
    made = phases(tiny, "ctranslate2", TALL, bits=bits)
    assert made["a decoder block"] == 2 * 40 * M * 2 * 2 + 14 * at_once
    source = prepare_job(str(tiny), "ctranslate2").source
    ends = source.settings.vocab_size * source.settings.hidden_size
    assert source.settings.tie_word_embeddings
    blocks = source.parameters - ends
    assert made["the proof"] == 4 * (2 * ends + 2 * blocks) + 6 * 4 * 96 * 30_000 + 48 * M
    more = Shapes(**{**vars(TALL), "blocks": 300})
    assert phases(tiny, "ctranslate2", more, bits=bits) == made


# The disk. A checkpoint of 0.67 billion weights, of which only the headers are there.

SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
SQUARE, MLP, VOCABULARY = 4096 * 4096, 4096 * 11008, 32000 * 4096
LINEAR = 2 * (4 * SQUARE + 3 * MLP)
DENSE = 2 * VOCABULARY + (2 * 2 + 1) * 4096
GROUPS = LINEAR // 128
G_IDX = 2 * (6 * 4096 + 11008) * 4


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("models") / "large", num_hidden_layers=1)
    changed = {
        **SIZES,
        "num_hidden_layers": 2,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    }
    config = json.loads((folder / "config.json").read_text()) | changed
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
    assert end == 2 * (LINEAR + DENSE)
    return folder


# method, bits, options, and the bytes of the artifact's weights by its layout; a checkpoint is there twice at the end
DISK: dict[str, tuple[str, str, dict[str, Any], float, int]] = {
    "gptq's layout": ("rtn", "4", {}, LINEAR / 2 + GROUPS * 2.5 + G_IDX + 2 * DENSE, 2),
    "3 bits": ("rtn", "3", {}, LINEAR * 3 / 8 + GROUPS * 2.375 + G_IDX + 2 * DENSE, 2),
    "8 bits": ("rtn", "8", {}, LINEAR + GROUPS * 3 + G_IDX + 2 * DENSE, 2),
    "groups of 32": ("rtn", "4", {"group_size": 32}, LINEAR / 2 + 4 * GROUPS * 2.5 + G_IDX + 2 * DENSE, 2),
    "awq's layout": ("rtn", "4", {"format": "awq"}, LINEAR / 2 + GROUPS * 2.5 + 2 * DENSE, 2),
    "nf4": ("nf4", "4", {"double_quant": False}, LINEAR / 2 + LINEAR / 64 * 4 + 2 * DENSE, 2),
    "float16": ("float", "float16", {}, 2 * (LINEAR + DENSE), 2),
    "float32": ("float", "float32", {}, 4 * (LINEAR + DENSE), 2),
    "gguf, F16": ("gguf", "F16", {}, 2 * (LINEAR + DENSE), 1),
    "gguf, Q8_0": ("gguf", "Q8_0", {}, (LINEAR + DENSE) * 34 / 32, 1),
    "ctranslate2, int8": ("ctranslate2", "int8", {}, LINEAR + DENSE, 1),
    "ctranslate2, float32": ("ctranslate2", "float32", {}, 4 * (LINEAR + DENSE), 1),
}  # fmt: skip
ABOUT, MORE = 50 * M, 0.03  # what may come beside the weights, and what a forecast may be above them


@pytest.mark.parametrize("case", DISK)
def test_disk_is_what_the_layout_takes_as_often_as_it_is_there(case: str, large: Path, tmp_path: Path) -> None:
    method, bits, options, weights, copies = DISK[case]
    disk = check(prepare_job(str(large), method, bits, **options), tmp_path / "out").disk_bytes
    assert copies * weights <= disk <= copies * (weights * (1 + MORE) + ABOUT)


def test_the_proof_of_a_large_model_takes_its_first_blocks(large: Path) -> None:
    job = prepare_job(str(large), "ctranslate2")
    assert job.method.peak_memory is not None
    shapes = shapes_of(job)
    one_block = (LINEAR + 5 * 4096) // 2  # of 0.67 billion weights half a billion are enough
    assert job.method.peak_memory(job, shapes).further == {
        "the proof": 4 * (3 * VOCABULARY + 2 * one_block) + 6 * 4 * 96 * 32_000 + 48 * M,
    }


@pytest.mark.parametrize(
    ("options", "spooled", "flows"),
    [({"imatrix": True}, 0, 1), ({"rounding": "gptq"}, 1, 2)],
    ids=["imatrix", "feedback"],
)
def test_disk_of_a_calibrated_gguf_holds_what_waits(
    options: dict[str, Any], spooled: int, flows: int, large: Path, tmp_path: Path
) -> None:
    """Q4_K takes 4.5 bits, Q6_K 6.5625: half of the values' and down projections', and the head."""
    plain = check(prepare_job(str(large), "gguf", "Q4_K_M"), tmp_path / "out").disk_bytes
    calibration = {**CALIBRATION, "sequences": 16, "length": 64}
    job = prepare_job(str(large), "gguf", "Q4_K_M", calibration=calibration, **options)
    more = check(job, tmp_path / "out").disk_bytes - plain
    assert more >= spooled * LINEAR * 4.5 / 8 + flows * 16 * 64 * 4096 * 2
    assert more <= spooled * LINEAR * 6.6 / 8 + flows * 16 * 64 * 2 * (4096 + 2 * 4096 + 3 * 4096)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_checkpoint_is_on_the_disk_twice_at_the_end(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []
    plain = CheckpointWriter._write_shard

    def noted(writer: CheckpointWriter, name: str, entries: Any) -> None:
        plain(writer, name, entries)
        sizes.append((bytes_in(writer._folder), (writer._folder / name).stat().st_size))

    monkeypatch.setattr(CheckpointWriter, "_write_shard", noted)
    for method in ("rtn", "nf4", "float"):
        sizes.clear()
        job = prepare_job(str(tiny), method)
        disk = check(job, tmp_path / method).disk_bytes
        conversion.run(job, tmp_path / method)
        [(peak, weights)] = sizes
        assert 1.9 * weights < peak <= disk


def test_packed_blocks_stay_beside_the_file_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny(tmp_path / "model", num_hidden_layers=2, hidden_size=256, num_attention_heads=4)
    sizes: list[tuple[int, int]] = []
    plain: Callable[..., None] = gguf.write_file

    def noted(file: Any, run: Any, *given: Any, **named: Any) -> None:
        plain(file, run, *given, **named)
        sizes.append((bytes_in(run.folder), next(run.folder.glob("*.gguf")).stat().st_size))

    monkeypatch.setattr(gguf, "write_file", noted)
    job = prepare_job(str(model), "gguf", "Q4_K_M", calibration=CALIBRATION, rounding="gptq")
    disk = check(job, tmp_path / "out").disk_bytes
    conversion.run(job, tmp_path / "out")
    [(peak, written)] = sizes
    assert 1.5 * written < peak <= disk


def test_a_disk_with_one_byte_too_few_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 7_000_000
    monkeypatch.setattr("shutil.disk_usage", lambda _place: SimpleNamespace(total=free, used=0, free=free))
    refuse_small_disk(tmp_path / "out", free)
    with pytest.raises(OutputError, match="too small"):
        refuse_small_disk(tmp_path / "out", free + 1)
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
    assert prepare_job(str(tiny), "gptq").offload_bytes == 20_000_000


def test_sizes_are_shown_in_powers_of_ten() -> None:
    shown = {0: "0.0 MB", 1_500_000: "1.5 MB", 999_900_000: "999.9 MB", 10**9: "1.00 GB", 1 << 30: "1.07 GB"}
    assert {value: megabytes(value) for value in shown} == shown


def test_a_shard_has_five_gb_at_most() -> None:
    assert CheckpointWriter.__init__.__defaults__ == (5_000_000_000,)


def test_what_is_printed_is_what_was_forecast(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_measure", lambda _job: (15.0, 600.0))
    flags = ("--out", tmp_path / "out", "--dry-run", "--json", tmp_path / "f.json")
    ended = quantkit("convert", tiny, "--method", "gptq", *CALIBRATION_FLAGS, *flags)
    values = json.loads((tmp_path / "f.json").read_text())
    assert (values["before_seconds"], values["work_seconds"]) == (15.0, 600.0)
    assert "time: about 10.2 minutes" in ended.out
    process = values["memory_bytes"] - max(values["phases_bytes"].values())
    assert math.isclose(process, 300e6, rel_tol=0.9)
    assert f"memory: {megabytes(values['memory_bytes'])} at the peak ({megabytes(process)} for the process" in ended.out
    assert f"disk: {megabytes(values['disk_bytes'])} at most" in ended.out
