"""Which pre-tokenizer of llama.cpp behaves like a byte-level BPE tokenizer: found by what it does to one text, or for
a vocabulary that nobody has listed by its own steps.

The text and the table are facts published by llama.cpp (convert_hf_to_gguf_update.py and conversion/base.py,
function `get_vocab_base_pre`, commit 00bd27a6; https://github.com/ggml-org/llama.cpp). The key is the first
16 digits of the sha256 of the token ids, written as Python writes a list. WordPiece entries are left out.
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

NAMES = {
    "b6e8e1518dc4305b": "chatglm-bpe",
    "81d72c7348a9f0eb": "chatglm-bpe",
    "a1336059768a55c9": "glm4",
    "9ca2dd618e8afaf0": "glm4",
    "cdf5f35325780597": "glm4",
    "1431a23e583c9743": "minerva-7b",
    "7e57df22b1fe23a7": "hunyuan",
    "bba3b3366b646dbd": "hunyuan-dense",
    "a6b57017d60e6edb": "falcon-h1",
    "60476e1243776c4f": "falcon-h1",
    "3eda48b4c4dc7de7": "falcon-h1",
    "48f8e02c0359c0bb": "falcon-h1",
    "81212dc7cdb7e0c1": "kimi-k2",
    "d4540891389ea895": "qwen2",
    "1444df51289cfa80": "qwen35",
    "66b8d4e19ab16c3b": "grok-2",
    "b3d1dd861f1d4c5c": "jina-v2-de",
    "0fe1cf6eda062318": "gpt-2",
    "0ef9807a4087ebef": "llama-bpe",
    "049ecf7629871e30": "deepseek-llm",
    "347715f544604f91": "deepseek-coder",
    "8aeee3860c56296a": "falcon",
    "9d032fcbd5501f4a": "falcon3",
    "b6dc8df998e1cfbd": "olmo",
    "35d91631860c815f": "starcoder",
    "3ce83efda5659b07": "gpt-2",
    "32d85c31273f8019": "stablelm2",
    "6221ad2852e85ce9": "refact",
    "9c2227e4dd922002": "command-r",
    "d772b220ace2baec": "tiny_aya",
    "e636dc30a262dcc0": "qwen2",
    "a8594e3edff7c29c": "dbrx",
    "c7699093ba4255a9": "jina-v1-en",
    "171aeeedd6fb548d": "jina-v2-es",
    "27949a2493fc4a9f": "jina-v2-de",
    "a023e9fdc5a11f03": "jina-v5-nano",
    "c136ed14d01c2745": "smaug-bpe",
    "c7ea5862a53e4272": "poro-chat",
    "7967bfa498ade6b7": "jina-v2-code",
    "7fc505bd3104ca10": "viking",
    "b53802fb28e26d64": "jais",
    "bc5108ee1eb6a3d6": "jais-2",
    "7b3e7548e4308f52": "codeshell",
    "63b97e4253352e6f": "tekken",
    "855059429035d75a": "smollm",
    "3c30d3ad1d6b6420": "bloom",
    "bc01ce58980e1db4": "gpt3-finnish",
    "4e2b24cc4770243d": "exaone",
    "fcace8b9cac38ce8": "phi-2",
    "60824e3c0d9401f8": "chameleon",
    "8b5a93ed70405748": "roberta-bpe",
    "ad851be1dba641f2": "gigachat",
    "d4c8f286ea6b520b": "megrez",
    "877081d19cf6996e": "deepseek-v3",
    "b3f499bb4255f8ca": "deepseek-r1-qwen",
    "ccc2ef013c104be7": "gpt-4o",
    "7dec86086fcc38b6": "superbpe",
    "1994ffd01900cfb3": "trillion",
    "96a5f08be6259352": "bailingmoe",
    "d353350c764d8c3b": "llama4",
    "0e9433cbbb161f89": "pixtral",
    "d5f1dd6f980fec56": "seed-coder",
    "b0a6b1c0bd5998eb": "a.x-4.0",
    "f6791d196f87ce6b": "midm-2.0",
    "169bf0296a13c4d9": "lfm2",
    "2085e1638f6c377a": "exaone4",
    "a1e163ecab2e718a": "mellum",
    "a0b64b4385f12366": "modern-bert",
    "49fc0303c9e0d2c2": "afmoe",
    "9b1be57e70d20d95": "bailingmoe2",
    "53e325976a6e1423": "granite-docling",
    "f4f37b6c8eb9ea29": "minimax-m2",
    "4a2e2abae11ca2b8": "kormo",
    "9d70134b369a70e5": "youtu",
    "16389f0a1f51ee53": "solar-open",
    "6c81ce329e080288": "exaone-moe",
    "d30d75d9059f1aa2": "qwen35",
    "b4b8ca1f97694945": "joyai-llm",
    "e4d54df1ebc1f2b9": "kanana2",
    "862f827721df9560": "f2llmv2",
    "62f6fb0a6fd5098c": "sarvam-moe",
}


# Steps of a tokenizer.json that are one of llama.cpp's pre-tokenizers (src/llama-vocab.cpp), for vocabularies that no
# table knows: trained or extended by somebody. The second place is whether merges are ignored for whole words.
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
    """The pre-tokenizer of llama.cpp that does these steps of a tokenizer.json, or None."""
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
    """The key of token ids in `NAMES`."""
    return hashlib.sha256(str(list(ids)).encode()).hexdigest()[:16]
