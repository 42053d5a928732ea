"""GPTQModel's GPTQ at its defaults."""

from __future__ import annotations

from gptqmodel import GPTQModel, QuantizeConfig
from worker import arguments, tell, token_lists


def main() -> None:
    """Quantize with bits, group size and symmetry as asked."""
    asked = arguments()
    config = QuantizeConfig(bits=asked.bits, group_size=asked.group_size, sym=not asked.asym)
    model = GPTQModel.load(str(asked.model), config)
    model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in token_lists(asked.calibration)])
    model.save(str(asked.out))
    tell("gptqmodel", desc_act=config.desc_act)


if __name__ == "__main__":
    main()
