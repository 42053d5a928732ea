"""AutoRound at its defaults (200 iterations): symmetric for GPTQ's layout, with zero points for AWQ's."""

from __future__ import annotations

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker import arguments, tell, token_lists


def main() -> None:
    """Quantize with bits, group size and symmetry as asked."""
    asked = arguments()
    tokens = token_lists(asked.calibration)
    examples = [
        {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        for ids in tokens
    ]
    rounding = AutoRound(
        AutoModelForCausalLM.from_pretrained(asked.model, dtype="auto"),
        AutoTokenizer.from_pretrained(asked.model),
        bits=asked.bits,
        group_size=asked.group_size,
        sym=not asked.asym,
        dataset=examples,
        seqlen=len(tokens[0]),
        nsamples=len(tokens),
        device_map="cpu",
    )
    form = "auto_awq" if asked.asym else "auto_gptq"
    rounding.quantize_and_save(str(asked.out), format=form)
    tell("auto-round", format=form)


if __name__ == "__main__":
    main()
