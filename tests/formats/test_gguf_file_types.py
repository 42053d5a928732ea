import itertools
from dataclasses import replace

import numpy as np
import pytest
from gguf_files import quantized_by_llama_cpp, slow_but

from quantkit.formats.gguf.file_types import (
    DEFAULT,
    IQ_MIXES,
    WEIGHTED_ONLY,
    ModelCounts,
    choose_types,
    describe_fallbacks,
)

gguf = pytest.importorskip("gguf")

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


CASES = [
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
QUICK = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "IQ3_M", "IQ4_XS")
TYPES = [name for name in DEFAULT if name not in ("F16", "BF16", "auto")]


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory):
    """A file of every case."""
    paths = []
    for number, (model, columns, tied) in enumerate(CASES):
        paths.append(tmp_path_factory.mktemp("base") / f"{number}.gguf")
        writer = gguf.GGUFWriter(paths[-1], model.name)
        writer.add_block_count(model.blocks)
        writer.add_context_length(32)
        writer.add_embedding_length(columns)
        writer.add_feed_forward_length(columns)
        writer.add_head_count(model.heads)
        writer.add_head_count_kv(model.kv_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_layer_norm_eps(1e-5)
        values = np.random.default_rng(0)
        for name, shape in shapes_of(model.blocks, columns, tied).items():
            writer.add_tensor(name, values.standard_normal(shape, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


@pytest.mark.parametrize("kind", slow_but(QUICK, TYPES))
def test_types_equal_those_of_llama_cpp(tmp_path, unquantized, kind):
    decisions = 0
    for number, (model, columns, tied) in enumerate(CASES):
        shapes = shapes_of(model.blocks, columns, tied)
        weighted = kind in WEIGHTED_ONLY or (kind in IQ_MIXES and number % 2 == 0)
        ones = dict.fromkeys(shapes, np.ones(columns, np.float32)) if weighted else None
        out = quantized_by_llama_cpp(unquantized[number], tmp_path / f"{number}.gguf", kind, ones)
        theirs = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
        choices = choose_types(shapes, kind, replace(model, weighted=weighted))
        ours = {name: choice.type for name, choice in choices.items()}
        assert ours == theirs, (model, columns, tied)
        assert list(ours) == list(theirs), "the order of the tensors"
        decisions += len(ours)
    assert decisions > 1500


def test_fallbacks_are_counted():
    model = ModelCounts(2, 9, 3)
    chosen = choose_types(shapes_of(2, 96, tied=True), "Q4_K_M", model)
    assert describe_fallbacks(chosen) == [
        "15 of 20 tensors have rows that are no multiple of 256: 12 Q4_K -> Q5_0, 3 Q6_K -> Q8_0"
    ]
    assert describe_fallbacks(choose_types(shapes_of(2, 256, tied=True), "Q4_K_M", model)) == []
