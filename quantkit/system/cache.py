"""The user's cache folder: the demo model, baselines, and other things that cost time to make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder of quantkit; the environment variable QUANTKIT_CACHE overrides it."""
    import platformdirs

    return Path(os.environ.get("QUANTKIT_CACHE") or platformdirs.user_cache_dir("quantkit"))
