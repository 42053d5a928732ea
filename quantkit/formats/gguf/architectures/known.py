"""What GGUF files of each architecture hold, by `model_type` of transformers: a row of `KNOWN` is an architecture.

Not here: OPT and GPT-J, which llama.cpp cannot compute; vision towers; what a checkpoint's own code computes.
"""

from __future__ import annotations

from quantkit.formats.gguf.architectures.rows import dense, gemma, latent, mixtures, recurrent, sparse, windowed

ROWS = (*dense.ROWS, *gemma.ROWS, *latent.ROWS, *mixtures.ROWS, *recurrent.ROWS, *sparse.ROWS, *windowed.ROWS)
KNOWN = {row.model_type: row for row in ROWS}
NO_GRAPH = (
    "aria_text", "axk1", "axk2", "beam", "biogpt", "cohere_compass_text", "ctrl", "diffllama", "flex_olmo", "flint",
    "gpt_neo", "gpt_neox_japanese", "gptj", "kolibri1", "lfm3", "modernbert-decoder", "nanochat", "olmo_hybrid", "opt",
    "persimmon", "vaultgemma",
)  # fmt: skip
# llama.cpp computes these, and nobody has written the row that says how.
UNWRITTEN = ("bailing_hybrid", "deepseek_v32", "dots3_note_text", "kimi_linear")
# Of the proven architectures those that are not written, and why.
LACKING = {
    **dict.fromkeys(NO_GRAPH, "llama.cpp has none"),
    **dict.fromkeys(UNWRITTEN, "not written"),
    "bitnet": "llama.cpp computes another activation",
    "phimoe": "llama.cpp weighs its experts otherwise",
}
