"""mlx-lm: an artifact of the format mlx, in the file's own float16 (bfloat16 would round scales and biases)."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from engine import arguments, prompt_ids, whole
from mlx_lm.utils import load_model


def main() -> None:
    """Load and run the prompt."""
    asked = arguments()
    model, _ = load_model(Path(asked.model))
    whole(asked, np.array(model(mx.array([prompt_ids(asked)]))[0].astype(mx.float32)))
    print("kernel: MLX")


if __name__ == "__main__":
    main()
