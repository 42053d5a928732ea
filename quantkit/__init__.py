"""quantkit: quantize Hugging Face causal language models, and measure what each artifact costs and is worth."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from quantkit.errors import DISTRIBUTION

if TYPE_CHECKING:
    from quantkit.comparison.compare import compare as compare
    from quantkit.conversion.convert import convert as convert
    from quantkit.conversion.verify import verify as verify
    from quantkit.errors import QuantkitError as QuantkitError
    from quantkit.evaluation.evaluate import evaluate as evaluate
    from quantkit.evaluation.tasks import evaluate_tasks as evaluate_tasks
    from quantkit.publishing.push import push as push
    from quantkit.records.artifact import Artifact as Artifact
    from quantkit.records.artifact import open_artifact as open_artifact
    from quantkit.records.recipe import EngineSpec as EngineSpec
    from quantkit.records.recipe import MemoryLimits as MemoryLimits
    from quantkit.records.recipe import ModelRef as ModelRef
    from quantkit.records.recipe import load_recipe as load_recipe
    from quantkit.records.report import Report as Report
    from quantkit.report.table import Table as Table

__version__ = version(DISTRIBUTION)
_HOMES = {
    "Artifact": "records.artifact",
    "EngineSpec": "records.recipe",
    "MemoryLimits": "records.recipe",
    "ModelRef": "records.recipe",
    "QuantkitError": "errors",
    "Report": "records.report",
    "Table": "report.table",
    "compare": "comparison.compare",
    "convert": "conversion.convert",
    "evaluate": "evaluation.evaluate",
    "evaluate_tasks": "evaluation.tasks",
    "load_recipe": "records.recipe",
    "open_artifact": "records.artifact",
    "push": "publishing.push",
    "verify": "conversion.verify",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Load the public names on first use, so that importing quantkit costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    return getattr(import_module(f"quantkit.{_HOMES[name]}"), name)
