"""transformers, with whatever its environment has for the format: gptqmodel, compressed-tensors, bitsandbytes."""

from __future__ import annotations

import torch
from engine import arguments, prompt_ids, whole
from transformers import AutoModelForCausalLM


def main() -> None:
    """Load and run the prompt; print which kernel computes the quantized layers."""
    asked = arguments()
    torch.set_num_threads(asked.threads)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=getattr(torch, asked.dtype), device_map="cpu")
    kernels = {type(module).__name__ for module in model.modules() if hasattr(module, "qzeros")}
    with torch.inference_mode():
        whole(asked, model(torch.tensor([prompt_ids(asked)])).logits[0])
    print("kernel: " + (", ".join(sorted(kernels)) or "none"))


if __name__ == "__main__":
    main()
