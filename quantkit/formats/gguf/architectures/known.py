"""All architectures that quantkit can write as GGUF, by transformers' `model_type`.

Not supported: OPT and GPT-J (llama.cpp cannot run them), vision towers, and models with custom code.
"""

from __future__ import annotations

from quantkit.formats.gguf.architectures import dense, gemma, latent, mixtures, recurrent

KNOWN = {row.model_type: row for family in (dense, gemma, mixtures, latent, recurrent) for row in family.ROWS}
NO_GRAPH = (
    "aria_text", "axk1", "axk2", "beam", "biogpt", "cohere_compass_text", "ctrl", "diffllama", "flex_olmo", "flint",
    "gpt_neo", "gpt_neox_japanese", "gptj", "kolibri1", "lfm3", "modernbert-decoder", "nanochat", "olmo_hybrid", "opt",
    "persimmon", "vaultgemma",
)  # fmt: skip
# Tested architectures that quantkit does not write, with the reason.
LACKING = {
    **dict.fromkeys(NO_GRAPH, "llama.cpp does not have it"),
    "bitnet": "llama.cpp computes another activation",
    "phimoe": "llama.cpp weighs its experts differently",
}
