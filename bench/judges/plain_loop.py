"""The papers' perplexity as a plain loop over transformers' model, the way most scripts do it.

The loss is taken in the next wider type: torch's cross_entropy over float32 logits of a vocabulary of 49152 is 7e-6
nats too low on a CPU, more than a fifth digit can bear.

python plain_loop.py MODEL TEXT WINDOWS N_CTX DTYPE THREADS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Print perplexity, seconds and tokens per second."""
    folder, text, windows, n_ctx, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    wider = torch.float64 if dtype == "float32" else torch.float32
    rows = Path(text).read_text(encoding="utf-8").splitlines(keepends=True)
    ids = tokenizer("\n\n".join(row if row.strip() else "" for row in rows), return_tensors="pt").input_ids
    losses = []
    begin = time.perf_counter()
    for i in range(int(windows)):
        window = ids[:, i * int(n_ctx) : (i + 1) * int(n_ctx)]
        with torch.no_grad():
            logits = model(window).logits
        shifted = logits[:, :-1].to(wider)
        losses.append(torch.nn.functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), window[0, 1:]).double())
    seconds = time.perf_counter() - begin
    figures = {
        "perplexity": float(torch.stack(losses).mean().exp()),
        "seconds": seconds,
        "tokens_per_second": int(windows) * int(n_ctx) / seconds,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
