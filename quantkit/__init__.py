"""quantkit: quantize Hugging Face causal language models, and measure what each artifact costs and is worth."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from quantkit.artifact import Artifact, open_artifact
    from quantkit.comparison import compare
    from quantkit.conversion import convert, verify
    from quantkit.evaluation import evaluate
    from quantkit.recipe import load_recipe
    from quantkit.report import Report
    from quantkit.table import Table
    from quantkit.tasks import evaluate_tasks

__version__ = version("quantkit")
__all__ = [
    "Artifact",
    "QuantkitError",
    "Report",
    "Table",
    "compare",
    "convert",
    "evaluate",
    "evaluate_tasks",
    "load_recipe",
    "open_artifact",
    "verify",
]
_HOMES = {
    "Artifact": "artifact",
    "Report": "report",
    "Table": "table",
    "compare": "comparison",
    "convert": "conversion",
    "evaluate": "evaluation",
    "evaluate_tasks": "tasks",
    "load_recipe": "recipe",
    "open_artifact": "artifact",
    "verify": "conversion",
}


def __getattr__(name: str) -> Any:
    """Load the public names on first use, so that importing quantkit costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    return getattr(import_module(f"quantkit.{_HOMES[name]}"), name)
