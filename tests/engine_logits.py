"""The logits of a model, whatever engine loaded it."""

import contextlib

import numpy as np
import pytest
import torch
from tiny_llama import VOCABULARY
from transformers import AutoModelForCausalLM

from quantkit.contracts.engine import LoadSpec, Window
from quantkit.contracts.registry import find_engine
from quantkit.formats.source import open_model

IDS = torch.randint(2, VOCABULARY, (128,), generator=torch.Generator().manual_seed(0)).tolist()
TWO_TEXTS = torch.arange(40).reshape(2, 20) * 7 % 300


def engine_logits(loaded, ids, first=0):
    """(B, T) int64 ids -> (B, T - first, V) float32 logits of the positions from `first` on."""
    targets = np.zeros(ids.shape[1] - first, np.int64)
    pieces = np.concatenate(list(loaded.pieces([Window(row, first, targets) for row in ids])))
    return pieces.reshape(len(ids), len(targets), -1)


def logits_by(engine, model, ids, n_ctx=64, **how):
    """The logits of an artifact or a checkpoint by the engine of that name, as a tensor; `how` is for `LoadSpec`."""
    loaded = find_engine(engine).load(open_model(model), LoadSpec(1, n_ctx, **how))
    return torch.from_numpy(engine_logits(loaded, np.asarray(ids)))


def logits_of_llama_cpp(path, ids, **how):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the reference of this test")
    engine = llama_cpp.Llama(
        str(path), n_ctx=128, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, type_k=0, type_v=0, **how
    )
    with contextlib.closing(engine):
        engine.eval(ids)
        return torch.tensor(np.array(engine.scores[: len(ids)]))


def logits_of(model, ids):
    """The logits of (B, T) ids by a model of transformers."""
    with torch.no_grad():
        return model.eval()(input_ids=torch.as_tensor(ids)).logits


def logits_of_transformers(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return logits_of(model, [ids])[0]


def far_apart(ours, theirs):
    """The largest difference, relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
