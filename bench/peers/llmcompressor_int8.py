"""llm-compressor's W8A8 in 8-bit integers: SmoothQuant and GPTQ, as its own example has them."""

from __future__ import annotations

from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor_common import compress
from worker import arguments, tell

STRENGTH = 0.8  # of its example for W8A8


def main() -> None:
    """Smooth, then quantize all linear layers but the head."""
    asked = arguments()
    recipe = [
        SmoothQuantModifier(smoothing_strength=STRENGTH),
        GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
    ]
    compress(asked, recipe)
    tell("llmcompressor", "compressed-tensors")


if __name__ == "__main__":
    main()
