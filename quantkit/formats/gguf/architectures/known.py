"""What GGUF files of each architecture hold, by `model_type` of transformers: a row of `KNOWN` is an architecture.

Not here: OPT and GPT-J, which llama.cpp does not have; vision towers; what a checkpoint's own code computes.
"""

from __future__ import annotations

from quantkit.formats.gguf.architectures.rows import dense, gemma, mixtures, recurrent

KNOWN = {row.model_type: row for row in (*dense.ROWS, *gemma.ROWS, *mixtures.ROWS, *recurrent.ROWS)}
NO_GRAPH = (
    "biogpt", "cohere2_moe", "cwm", "diffllama", "flex_olmo", "gpt_neox_japanese", "gptj", "granite_swa",
    "granitemoe_swa", "helium", "mellum", "minimax_m3_vl_text", "nanochat", "opt", "persimmon", "vaultgemma",
)  # fmt: skip
# Of the proven architectures those that are not written, and why.
LACKING = {
    **dict.fromkeys(NO_GRAPH, "llama.cpp has none"),
    "bitnet": "llama.cpp computes another activation",
    "phimoe": "llama.cpp weighs its experts otherwise",
}
