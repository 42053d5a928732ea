"""llm-compressor's AWQ at its defaults.

Its cache pins memory for a GPU that is not there and stops; pinning changes no value, so it is left out.
"""

from __future__ import annotations

from typing import Any

from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from llmcompressor_common import compress, scheme
from worker import arguments, tell


def _leave(*_arguments: Any, **_options: Any) -> None:
    """Pin nothing."""


def main() -> None:
    """Scale, then round all linear layers but the head."""
    asked = arguments()
    IntermediatesCache.pin_memory = _leave
    rounding = QuantizationModifier(config_groups={"group_0": scheme(asked)}, ignore=["lm_head"])
    compress(asked, [AWQModifier(), rounding])
    tell("llmcompressor", "compressed-tensors")


if __name__ == "__main__":
    main()
