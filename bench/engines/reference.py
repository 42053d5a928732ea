"""quantkit's reference engine: an artifact, or a source model."""

from __future__ import annotations

import numpy as np
from engine import arguments, prompt_ids, whole

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import open_subject
from quantkit.contracts.registry import find_engine


def main() -> None:
    """Load and run the prompt."""
    asked = arguments()
    ids = prompt_ids(asked)
    spec = LoadSpec(threads=asked.threads, n_ctx=len(ids), dtype=asked.dtype)
    model = find_engine("reference").load(open_subject(asked.model), spec)
    whole(asked, model.logits(np.asarray([ids]))[0])


if __name__ == "__main__":
    main()
