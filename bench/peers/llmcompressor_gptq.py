"""llm-compressor's GPTQ at its defaults."""

from __future__ import annotations

from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor_common import compress, scheme
from worker import arguments, tell


def main() -> None:
    """Quantize all linear layers but the head."""
    asked = arguments()
    compress(asked, [GPTQModifier(config_groups={"group_0": scheme(asked)}, ignore=["lm_head"])])
    tell("llmcompressor", "compressed-tensors")


if __name__ == "__main__":
    main()
