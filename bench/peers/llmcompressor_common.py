"""What both workers of llm-compressor share: the calibration set, the scheme, and the run."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker import token_lists


def scheme(asked: Namespace) -> QuantizationScheme:
    """Weight-only integers in groups, as asked."""
    weights = QuantizationArgs(
        num_bits=asked.bits, type="int", strategy="group", group_size=asked.group_size, symmetric=not asked.asym
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


def compress(asked: Namespace, recipe: list[Any]) -> None:
    """Run the recipe on the model with the calibration tokens as they are, and save."""
    tokens = token_lists(asked.calibration)
    rows = Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in tokens])
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=rows,
        recipe=recipe,
        max_seq_length=len(tokens[0]),
        num_calibration_samples=len(tokens),
        output_dir=str(asked.out),
    )
