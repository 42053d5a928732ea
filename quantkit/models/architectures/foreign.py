"""The one boundary at which transformers' code of an architecture runs for us.

Its code may want what nobody has tried: a language to be chosen, more than hidden states, other shapes. What it raises
for an architecture that is not proven (proven.py) is told in one line. Of a proven one every error passes as it is,
since it is a bug to be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quantkit.errors import QuantkitError, UnsupportedError, one_line, reason_of, shortage_of
from quantkit.models.architectures.proven import PROVEN
from quantkit.untrusted import shown

FIX = "Another method, such as rtn, or another engine may take it"
LONGEST_PART = 120  # characters of what names the part that ran


class Signal(Exception):  # noqa: N818 - a signal, not an error
    """Ends a forward pass early, on purpose: what it was for has been seen."""


@contextmanager
def running(settings: Any, part: str) -> Iterator[None]:
    """Raise UnsupportedError, with the model type and the `part` of it that runs, for what foreign code raises inside.

    `settings` is the configuration of transformers. Errors of proven architectures pass, and so do errors of ours,
    those of files, interruptions, and what says that memory ran out.
    """
    try:
        yield
    except (QuantkitError, Signal, OSError):
        raise
    except Exception as raised:
        if is_proven(settings) or shortage_of(raised):
            raise
        kind = type(raised).__name__
        reason = reason_of(raised)
        raise UnsupportedError(
            f"the architecture {shown(settings.model_type)} is untested, and transformers' code of it ended with an "
            f"error in {one_line(part, LONGEST_PART)}: {reason if reason.startswith(kind) else f'{kind}: {reason}'}. "
            f"{FIX}"
        ) from raised


def is_proven(settings: Any) -> bool:
    """Whether a model of this configuration, or its text half, goes through the tests."""
    return not PROVEN.isdisjoint((settings.model_type, settings.get_text_config(decoder=True).model_type))


def block_of(index: int, module: object) -> str:
    """How messages call a decoder block."""
    return f"block {index} ({type(module).__name__})"
