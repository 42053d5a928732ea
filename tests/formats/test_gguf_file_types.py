import ctypes
import itertools
from dataclasses import replace

import numpy as np
import pytest

from quantkit.formats.gguf.file_types import (
    DEFAULT,
    IQ_MIXES,
    WEIGHTED_ONLY,
    ModelCounts,
    choose_types,
    describe_fallbacks,
    fitting,
)

gguf = pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the reference of these tests")

ROWS = 8
PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def shapes_of(blocks, columns, tied):
    shapes = {"token_embd.weight": (ROWS, columns), "output_norm.weight": (columns,)}
    if not tied:
        shapes["output.weight"] = (ROWS, columns)
    for block, part in itertools.product(range(blocks), PARTS):
        shapes[f"blk.{block}.{part}.weight"] = (ROWS, columns)
    for block in range(blocks):
        shapes[f"blk.{block}.attn_norm.weight"] = (columns,)
        shapes[f"blk.{block}.attn_q.bias"] = (ROWS,)
    return shapes


def types_of_llama_cpp(path, shapes, model, file_type, columns, weighted):
    writer = gguf.GGUFWriter(path, model.name)
    writer.add_block_count(model.blocks)
    writer.add_context_length(32)
    writer.add_embedding_length(columns)
    writer.add_feed_forward_length(columns)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    values = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, values.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(gguf.LlamaFileType["ALL_F32" if file_type == "F32" else f"MOSTLY_{file_type}"])
    params.nthread = 1
    if weighted:
        ones = np.ones(columns, np.float32)
        entries = (llama_cpp.llama_model_imatrix_data * (len(shapes) + 1))()
        for entry, name in zip(entries, shapes, strict=False):
            entry.name, entry.size = name.encode(), ones.size
            entry.data = ones.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = entries
    out = path.with_suffix(".out.gguf")
    assert llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(params)) == 0
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}


QUICK = [*(name for name in DEFAULT if not name.startswith("IQ") and name not in ("F16", "BF16", "auto")), "IQ4_XS"]


@pytest.mark.parametrize(
    "file_type", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in IQ_MIXES if name not in QUICK)]
)
def test_types_equal_those_of_llama_cpp(tmp_path, file_type):
    cases = [
        (ModelCounts(1, 4, 4), 256, True),
        (ModelCounts(7, 4, 1), 256, False),
        (ModelCounts(16, 8, 4), 256, True),
        (ModelCounts(33, 6, 2), 256, True),
        (ModelCounts(80, 8, 1), 256, False),
        (ModelCounts(80, 8, 8), 256, False),
        (ModelCounts(12, 9, 3), 96, True),
        (ModelCounts(12, 9, 3), 96, False),
        (ModelCounts(4, 4, 2), 80, False),
        (ModelCounts(33, 4, 1, name="falcon"), 256, True),
        (ModelCounts(33, 4, 1, name="falcon"), 256, False),
        (ModelCounts(80, 8, 1, name="qwen2"), 256, False),
        (ModelCounts(80, 8, 8, name="qwen2"), 256, False),
    ]
    decisions = 0
    for number, (model, columns, tied) in enumerate(cases):
        shapes = shapes_of(model.blocks, columns, tied)
        weighted = file_type in WEIGHTED_ONLY or (file_type in IQ_MIXES and number % 2 == 0)
        theirs = types_of_llama_cpp(tmp_path / f"{number}.gguf", shapes, model, file_type, columns, weighted)
        counts = replace(model, weighted=weighted)
        ours = {name: choice.type for name, choice in choose_types(shapes, file_type, counts).items()}
        assert ours == theirs, (model, columns, tied)
        assert list(ours) == list(theirs), "the order of the tensors"
        decisions += len(ours)
    assert decisions > 1500


def test_expert_and_fused_rules_by_hand():
    shapes = {f"blk.0.{part}.weight": (ROWS, 256) for part in ("attn_k", "attn_v", "attn_output", "ffn_gate")}
    shapes["blk.0.ffn_gate_inp.weight"] = (ROWS, 256)
    chosen = choose_types(shapes, "Q4_K_M", ModelCounts(1, 8, 2, experts=8))
    assert {name.split(".")[2]: choice.type for name, choice in chosen.items()} == {
        "attn_k": "Q8_0",
        "attn_v": "Q8_0",
        "attn_output": "Q5_K",
        "ffn_gate": "Q4_K",
        "ffn_gate_inp": "F32",
    }


@pytest.mark.parametrize(
    ("intended", "columns", "type_name"),
    [
        ("Q4_K", 512, "Q4_K"),
        ("Q4_K", 288, "Q5_0"),
        ("Q4_K", 40, "F16"),
        ("Q8_0", 40, "F16"),
        ("F16", 7, "F16"),
    ],
)
def test_short_rows_take_the_type_that_fits(intended, columns, type_name):
    assert fitting(intended, columns) == type_name


def test_fallbacks_are_counted():
    model = ModelCounts(2, 9, 3)
    chosen = choose_types(shapes_of(2, 96, tied=True), "Q4_K_M", model)
    assert describe_fallbacks(chosen) == [
        "15 of 20 tensors have rows that are no multiple of 256: 12 Q4_K -> Q5_0, 3 Q6_K -> Q8_0"
    ]
    assert describe_fallbacks(choose_types(shapes_of(2, 256, tied=True), "Q4_K_M", model)) == []
