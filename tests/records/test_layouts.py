"""The layout of what users keep, a manifest and a report: a name that changes here changes in their files."""

import json
from pathlib import Path

import pytest
from tiny_models import CALIBRATION, EVALUATION

from quantkit import convert, evaluate

# Values that depend on the model, the text or the machine; of the rest the names and kinds are compared.
OPEN = {"config", "hashes", "versions", "tensor_types", "files"}
STORED = Path(__file__).with_name("layouts.json")


def layout(value):
    """JSON values with each leaf as its kind, and each list as its first element."""
    if isinstance(value, dict):
        return {name: "open" if name in OPEN else layout(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [layout(inner) for inner in value[:1]]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


@pytest.mark.usefixtures("new_cache")
def test_the_layouts_are_the_stored_ones(tiny, tmp_path):
    artifact = convert(str(tiny), "gptq", 4, tmp_path / "out", group_size=64, calibration=CALIBRATION)
    report = evaluate(artifact, source=str(tiny), **EVALUATION)
    figures = {m.name: {"unit": m.unit, **layout(dict(m.details))} for m in report.measurements}
    made = {
        "manifest": layout(json.loads((artifact.folder / "quantkit.json").read_text())),
        "report": layout(report.model_dump(mode="json")) | {"measurements": figures},
    }
    assert made == json.loads(STORED.read_text())
