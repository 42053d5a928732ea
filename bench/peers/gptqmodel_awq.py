"""GPTQModel's AWQ at its defaults, on the backend that runs without a GPU."""

from __future__ import annotations

from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT, METHOD
from worker import arguments, tell, token_lists


def main() -> None:
    """Quantize with the group size as asked; zero points, 4 bits."""
    asked = arguments()
    config = QuantizeConfig(
        bits=asked.bits, group_size=asked.group_size, sym=not asked.asym, quant_method=METHOD.AWQ, format=FORMAT.GEMM
    )
    model = GPTQModel.load(str(asked.model), config)
    examples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in token_lists(asked.calibration)]
    model.quantize(examples, backend=BACKEND.AWQ_TORCH)
    model.save(str(asked.out))
    tell("gptqmodel")


if __name__ == "__main__":
    main()
