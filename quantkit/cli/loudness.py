"""How much a command says: the result alone, progress too (the default), or what libraries say as well."""

from __future__ import annotations

import logging
import os
import warnings

import typer

quiet = False  # whether progress is left out


def choose(nothing_else: bool, everything: bool) -> None:
    """Settle it for this process, before libraries are imported; raises BadParameter for both at once."""
    global quiet
    if nothing_else and everything:
        raise typer.BadParameter("--quiet and --verbose exclude each other")
    quiet = nothing_else
    if not everything:
        hush()


def hush() -> None:
    """Keep libraries' bars, warnings and advice off the screen."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("bitsandbytes", "accelerate", "ctranslate2"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # What concerns the user is looked at where a result is used, and told in quantkit's words.
    warnings.simplefilter("ignore")
