"""What GGUF files of each architecture hold, by `model_type` of transformers: a row of `KNOWN` is an architecture.

Not here: OPT and GPT-J, which llama.cpp cannot compute; vision towers; what a checkpoint's own code computes.
"""

from __future__ import annotations

from quantkit.formats.gguf.architectures.rows import dense, gemma, mixtures, recurrent, windowed

ROWS = (*dense.ROWS, *gemma.ROWS, *mixtures.ROWS, *recurrent.ROWS, *windowed.ROWS)
KNOWN = {row.model_type: row for row in ROWS}
NO_GRAPH = (
    "biogpt", "diffllama", "flex_olmo", "gpt_neox_japanese", "gptj",
    "nanochat", "opt", "persimmon", "vaultgemma",
)  # fmt: skip
# Of the proven architectures those that are not written, and why.
LACKING = {
    **dict.fromkeys(NO_GRAPH, "llama.cpp has none"),
    "minimax_m3_vl_text": "its sparse attention is not written",
    "bitnet": "llama.cpp computes another activation",
    "phimoe": "llama.cpp weighs its experts otherwise",
}
