"""AutoAWQ 0.2.9, the last version, at its defaults."""

from __future__ import annotations

from awq import AutoAWQForCausalLM
from transformers import PreTrainedTokenizerFast
from worker import arguments, tell, token_lists


def main() -> None:
    """Quantize with the group size as asked; zero points, 4 bits."""
    asked = arguments()
    tokens = token_lists(asked.calibration)
    model = AutoAWQForCausalLM.from_pretrained(str(asked.model), device_map="cpu")
    # Its transformers does not know the class that newer ones write into tokenizer_config.json.
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(asked.model / "tokenizer.json"))
    config = {"zero_point": asked.asym, "q_group_size": asked.group_size, "w_bit": asked.bits, "version": "GEMM"}
    model.quantize(
        tokenizer,
        quant_config=config,
        calib_data=tokens,
        max_calib_samples=len(tokens),
        max_calib_seq_len=len(tokens[0]),
    )
    model.save_quantized(str(asked.out))
    tokenizer.save_pretrained(asked.out)
    tell("autoawq", "triton")


if __name__ == "__main__":
    main()
