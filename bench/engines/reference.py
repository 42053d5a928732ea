"""quantkit's reference engine: an artifact, or a source model."""

from __future__ import annotations

import numpy as np
from engine import arguments, prompt_ids, whole

from quantkit.contracts.engine import LoadSpec, Window
from quantkit.contracts.registry import find_engine
from quantkit.formats.source import open_model


def main() -> None:
    """Load and run the prompt."""
    asked = arguments()
    ids = prompt_ids(asked)
    spec = LoadSpec(threads=asked.threads, n_ctx=len(ids), dtype=asked.dtype)
    model = find_engine("reference").load(open_model(asked.model), spec)
    window = Window(np.asarray(ids), 0, np.zeros(len(ids), np.int64))
    whole(asked, np.concatenate(list(model.pieces([window]))))


if __name__ == "__main__":
    main()
