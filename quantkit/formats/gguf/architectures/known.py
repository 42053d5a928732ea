"""All architectures that GGUF files are written of, by `model_type` of transformers.

Not here: OPT and GPT-J, which llama.cpp cannot compute; vision towers; code of a checkpoint's own.
"""

from __future__ import annotations

from quantkit.formats.gguf.architectures import dense, gemma, latent, mixtures, recurrent

KNOWN = {row.model_type: row for family in (dense, gemma, mixtures, latent, recurrent) for row in family.ROWS}
NO_GRAPH = (
    "aria_text", "axk1", "axk2", "beam", "biogpt", "cohere_compass_text", "ctrl", "diffllama", "flex_olmo", "flint",
    "gpt_neo", "gpt_neox_japanese", "gptj", "kolibri1", "lfm3", "modernbert-decoder", "nanochat", "olmo_hybrid", "opt",
    "persimmon", "vaultgemma",
)  # fmt: skip
# Of the proven architectures those that are not written, and why.
LACKING = {
    **dict.fromkeys(NO_GRAPH, "llama.cpp has none"),
    "bitnet": "llama.cpp computes another activation",
    "phimoe": "llama.cpp weighs its experts otherwise",
}
