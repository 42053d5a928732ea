"""Damage to checkpoints that are quantized already: to their settings, and to codes, scales and zero points."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np

from bench.fuzz import judges
from bench.fuzz.bases import copied
from bench.fuzz.case import Attack, Case, Kind
from bench.fuzz.mutations import Damage, json_text, parts_of, raw_bytes, safetensors_bytes
from bench.fuzz.quantized_bases import MXFP4, NAMES

KEYS = (
    "quantization_config", "quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "version",
    "zero_point", "w_bit", "q_group_size", "config_groups", "format", "weights", "num_bits", "strategy", "symmetric",
    "type", "actorder", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "weight_block_size", "scale_fmt",
    "expert_dtype", "activation_scheme", "targets", "ignore", "block_structure", "scale_dtype", "input_activations",
)  # fmt: skip
PARTS = ("scale", "SCB", "absmax", "zero", "g_idx", "shape", "quant", "format", "nested", "qweight", "packed", "blocks")
BYTES = (
    b"\xff",
    b"\x7f",
    b"\0",
    b"\x80",
    b"\0\0\x80\x7f",
    b"\0\0\xc0\x7f",
    b"\0\x7c",
    b"\x80\x7f",
    b"\1",
    b"\0\0\x80\xff",
)
NEAR = {"rtol": 1e-5, "atol": 1e-30}
HALF = {"rtol": 4e-3, "atol": 1e-6}  # what a kept checkpoint stores in 16 bits


def settings_text(damage: Damage, data: bytes) -> bytes:
    """config.json with changes in what it says of the quantization."""
    if damage.draw.random() < 0.05:
        return raw_bytes(damage, data)
    values = json.loads(data)
    if damage.draw.random() < 0.85:
        changed = json.loads(json_text_or_same(damage, values["quantization_config"]))
        return json.dumps({**values, "quantization_config": changed}).encode("utf-8", "surrogatepass")
    return json_text(damage, values, KEYS)


def json_text_or_same(damage: Damage, value: object) -> bytes:
    """Changed JSON that json.loads takes, or an empty object."""
    text = json_text(damage, value, KEYS)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return b"{}"
    return text


def part_bytes(damage: Damage, data: bytes) -> bytes:
    """A safetensors file one of whose small parts, such as scales, has other values."""
    header, tensors = parts_of(data)
    names = [name for name in header if any(part in name.rpartition(".")[2] for part in PARTS)]
    entry = header[name := damage.draw.choice(names)]
    start, end = entry["data_offsets"]
    piece = damage.draw.choice(BYTES)
    count = damage.draw.choice((1, 1, math.ceil((end - start) / len(piece))))
    at = start + damage.draw.randrange(max(1, end - start)) // len(piece) * len(piece) if count == 1 else start
    damage.notes.append(f"{count} times {piece!r} at byte {at - start} of {name}")
    changed = tensors[:at] + (piece * count)[: end - at] + tensors[min(end, at + len(piece) * count) :]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + changed


def sources(case: Case) -> Attack:
    """A quantized checkpoint that is dequantized, kept, or made into something else."""
    name = case.draw.choice(NAMES)
    folder = copied(case.bases / "quantized" / name, case.here / "model")
    case.say(name)
    change = case.draw.choice((settings_text, settings_text, part_bytes, part_bytes, safetensors_bytes))
    case.rewrite(folder / ("config.json" if change is settings_text else "model.safetensors"), change)
    out = case.here / "out"
    arguments = ["convert", str(folder), "--out", "out", "--method"]
    kind = case.draw.random()
    if kind < 0.75 or name == MXFP4:
        return Attack([*arguments, "float", "--bits", "float32"], lambda: judge(folder, out, "float"))
    if kind < 0.9:
        bits = case.draw.choice(("4", "4", "8"))
        layout = case.draw.choice(("gptq", "awq", "compressed-tensors"))
        if "mxfp4" in name:
            bits, layout = "mxfp4", "compressed-tensors"
        return Attack([*arguments, "keep", "--bits", bits, "--format", layout], lambda: judge(folder, out, "keep"))
    return Attack([*arguments, *case.draw.choice((["gguf", "--bits", "Q8_0"], ["rtn"], ["nf4"]))])


def judge(folder: Path, out: Path, method: str) -> str:
    """Whether an artifact has the values that the checkpoint has by plain arithmetic."""
    from bench.fuzz.dequantize import values_of

    try:
        theirs = values_of(folder)
    except Exception as error:  # noqa: BLE001 - whatever it raises is its refusal
        return f"plain arithmetic has no values: {type(error).__name__}: {str(error)[:200]}"
    ours = values_of(out)
    if missing := sorted(ours.keys() - theirs.keys()):
        return f"tensors of nowhere: {missing[:3]}"
    if lost := sorted(theirs.keys() - ours.keys()):
        return "" if "leaves out" in judges.notes_of(out) else f"tensors that are lost: {lost[:3]}"
    for name, value in ours.items():
        exact = theirs[name]
        if value.shape != exact.shape or not np.allclose(value, exact, **(NEAR if method == "float" else HALF)):
            return f"{name} {value.shape} has other values than by plain arithmetic, {exact.shape}"
    wrong = judges.load(out)[1] if method == "float" else ""
    return f"the artifact: {wrong}" if wrong else ""


KINDS: dict[str, Kind] = {"quantized sources": sources}
