"""Find the name of llama.cpp's pre-tokenizer for a byte-level BPE tokenizer, by its ids for a probe text or its steps.

The probe text and table are llama.cpp's (convert_hf_to_gguf_update.py; `get_vocab_base_pre` in conversion/base.py,
commit 00bd27a6; https://github.com/ggml-org/llama.cpp). The table's key is the first 16 hex digits of the sha256 of
str(ids). WordPiece entries are omitted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

PROBE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ "
    "(multiple emojis concatenated) ✅ 🦙🦙 3 33 333 3333 33333 333333 3333333 33333333 "
    "3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ "
    "------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, "
    "'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)

_FINGERPRINTS = {
    "chatglm-bpe": "b6e8e1518dc4305b 81d72c7348a9f0eb", "glm4": "a1336059768a55c9 9ca2dd618e8afaf0 cdf5f35325780597",
    "minerva-7b": "1431a23e583c9743", "hunyuan": "7e57df22b1fe23a7", "hunyuan-dense": "bba3b3366b646dbd",
    "falcon-h1": "a6b57017d60e6edb 60476e1243776c4f 3eda48b4c4dc7de7 48f8e02c0359c0bb", "kimi-k2": "81212dc7cdb7e0c1",
    "qwen2": "d4540891389ea895 e636dc30a262dcc0", "qwen35": "1444df51289cfa80 d30d75d9059f1aa2",
    "grok-2": "66b8d4e19ab16c3b", "jina-v2-de": "b3d1dd861f1d4c5c 27949a2493fc4a9f",
    "gpt-2": "0fe1cf6eda062318 3ce83efda5659b07", "llama-bpe": "0ef9807a4087ebef", "deepseek-llm": "049ecf7629871e30",
    "deepseek-coder": "347715f544604f91", "falcon": "8aeee3860c56296a", "falcon3": "9d032fcbd5501f4a",
    "olmo": "b6dc8df998e1cfbd", "starcoder": "35d91631860c815f", "stablelm2": "32d85c31273f8019",
    "refact": "6221ad2852e85ce9", "command-r": "9c2227e4dd922002", "tiny_aya": "d772b220ace2baec",
    "dbrx": "a8594e3edff7c29c", "jina-v1-en": "c7699093ba4255a9", "jina-v2-es": "171aeeedd6fb548d",
    "jina-v5-nano": "a023e9fdc5a11f03", "smaug-bpe": "c136ed14d01c2745", "poro-chat": "c7ea5862a53e4272",
    "jina-v2-code": "7967bfa498ade6b7", "viking": "7fc505bd3104ca10", "jais": "b53802fb28e26d64",
    "jais-2": "bc5108ee1eb6a3d6", "codeshell": "7b3e7548e4308f52", "tekken": "63b97e4253352e6f",
    "smollm": "855059429035d75a", "bloom": "3c30d3ad1d6b6420", "gpt3-finnish": "bc01ce58980e1db4",
    "exaone": "4e2b24cc4770243d", "phi-2": "fcace8b9cac38ce8", "chameleon": "60824e3c0d9401f8",
    "roberta-bpe": "8b5a93ed70405748", "gigachat": "ad851be1dba641f2", "megrez": "d4c8f286ea6b520b",
    "deepseek-v3": "877081d19cf6996e", "deepseek-r1-qwen": "b3f499bb4255f8ca", "gpt-4o": "ccc2ef013c104be7",
    "superbpe": "7dec86086fcc38b6", "trillion": "1994ffd01900cfb3", "bailingmoe": "96a5f08be6259352",
    "llama4": "d353350c764d8c3b", "pixtral": "0e9433cbbb161f89", "seed-coder": "d5f1dd6f980fec56",
    "a.x-4.0": "b0a6b1c0bd5998eb", "midm-2.0": "f6791d196f87ce6b", "lfm2": "169bf0296a13c4d9",
    "exaone4": "2085e1638f6c377a", "mellum": "a1e163ecab2e718a", "modern-bert": "a0b64b4385f12366",
    "afmoe": "49fc0303c9e0d2c2", "bailingmoe2": "9b1be57e70d20d95", "granite-docling": "53e325976a6e1423",
    "minimax-m2": "f4f37b6c8eb9ea29", "kormo": "4a2e2abae11ca2b8", "youtu": "9d70134b369a70e5",
    "solar-open": "16389f0a1f51ee53", "exaone-moe": "6c81ce329e080288", "joyai-llm": "b4b8ca1f97694945",
    "kanana2": "e4d54df1ebc1f2b9", "f2llmv2": "862f827721df9560", "sarvam-moe": "62f6fb0a6fd5098c",
}  # fmt: skip
NAMES = {key: name for name, keys in _FINGERPRINTS.items() for key in keys.split()}


# Steps of a tokenizer.json that equal a pre-tokenizer of llama.cpp (src/llama-vocab.cpp), for vocabularies that no
# table knows, such as retrained ones. The second value: whether merges are ignored for whole words.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
ONE_DIGIT = CL100K.replace("{1,3}", "")
STEPS = {
    (("words",), False): "gpt-2",
    (("digits", "words"), False): "smollm",
    ((CL100K, "bytes"), True): "llama-bpe",
    ((CL100K, "bytes"), False): "dbrx",
    ((ONE_DIGIT, "bytes"), False): "qwen2",
}


def steps_name(steps: Iterable[dict[str, Any]], ignores_merges: bool) -> str | None:
    """Return the name of llama.cpp's pre-tokenizer that has these tokenizer.json steps, or None."""
    return STEPS.get((tuple(_step(step) for step in steps), ignores_merges))


def _step(step: dict[str, Any]) -> str:
    kind = step["type"]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return "words" if step.get("use_regex", True) else "bytes"
    if kind == "Digits" and step.get("individual_digits"):
        return "digits"
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return str(step["pattern"].get("Regex", ""))
    return f"unknown {kind}"


def fingerprint(ids: Sequence[int]) -> str:
    """Return the key in `NAMES` for the probe text's token ids."""
    return hashlib.sha256(str(list(ids)).encode()).hexdigest()[:16]
