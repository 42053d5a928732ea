"""llama-perplexity's algorithm, driven through llama-cpp-python's low-level interface.

The text is tokenized by llama.cpp, cut into chunks of n_ctx; the first token of each is BOS where the vocabulary adds
one; the second half counts. https://github.com/ggml-org/llama.cpp, tools/perplexity.

python llama_perplexity.py FILE.gguf TEXT CHUNKS THREADS
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np

N_CTX = 512


def main() -> None:
    """Print perplexity, its error, targets, seconds of the chunks and tokens per second."""
    model_path, text_path, chunks, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(model_path.encode(), model_params)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    size = llama_cpp.llama_vocab_n_tokens(vocabulary)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = N_CTX
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    text = text_path.read_bytes()
    tokens = (llama_cpp.llama_token * len(text))()
    count = llama_cpp.llama_tokenize(vocabulary, text, len(text), tokens, len(text), True, False)
    add_bos = llama_cpp.llama_vocab_get_add_bos(vocabulary)
    batch = llama_cpp.llama_batch_init(N_CTX, 0, 1)
    first = N_CTX // 2
    nll: list[float] = []
    begin = time.perf_counter()
    for chunk in range(min(chunks, count // N_CTX)):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        ids = list(tokens[chunk * N_CTX : (chunk + 1) * N_CTX])
        batch.n_tokens = N_CTX
        for i, token in enumerate(ids):
            batch.token[i] = llama_cpp.llama_vocab_bos(vocabulary) if i == 0 and add_bos else token
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = i, 1, 0, i >= first
        assert llama_cpp.llama_decode(context, batch) == 0
        found = llama_cpp.llama_get_logits(context)
        logits = np.ctypeslib.as_array(found, shape=(N_CTX - first, size))[:-1].astype(np.float32)
        top = logits.max(1, keepdims=True)
        total = np.log(np.exp(logits - top).sum(1, dtype=np.float64)) + top[:, 0]
        nll += (total - logits[np.arange(len(logits)), ids[first + 1 :]]).tolist()
    seconds = time.perf_counter() - begin
    mean = sum(nll) / len(nll)
    square = sum(value * value for value in nll) / len(nll)
    figures = {
        "perplexity": math.exp(mean),
        "stderr": math.exp(mean) * math.sqrt((square - mean * mean) / (len(nll) - 1)),
        "targets": len(nll),
        "seconds": seconds,
        "tokens_per_second": min(chunks, count // N_CTX) * N_CTX / seconds,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
