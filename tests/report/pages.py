"""Pages of made-up reports, for tests of what stands in them and of what a browser makes of them."""

from pathlib import Path

from made_up_reports import diverging, report

from quantkit.artifact import Artifact, Manifest, SourceEntry, WeightError
from quantkit.recipe import ConvertRecipe
from quantkit.report.page.page import page
from quantkit.report.page.view import View
from quantkit.report.records import ModelEntry
from quantkit.report.sheet import joined
from quantkit.report.table import Table


def manifest(name):
    """A manifest in which `name` stands wherever others decide on a text."""
    recipe = ConvertRecipe(model=name, method=name, bits=name, format=name, options={name: name}, revision=name)
    return Manifest(
        recipe=recipe,
        format=name,
        options={name: name},
        source=SourceEntry(model=name, revision=name, architecture=name, parameters=1, config={}, hashes={}),
        versions={name: name},
        tensor_types={name: 1},
        weight_files=(name,),
        weight_bytes=1,
        bits_per_weight=4,
        weight_error=WeightError(mean=0.1, worst=0.2, worst_tensor=name),
        notes=(name,),
        files={},
    )


def hostile(name):
    """A page in which `name` stands wherever others decide on a text."""
    reports = []
    for i, kld in enumerate((0.001, 0.5, 0.02)):
        entry = ModelEntry(label=f"{name}{i}", name=name, method=name if i else None, digest=name, notes=(name,))
        one = report(name, "gptq", 21.0 + i, 1e6 + 1e5 * i, {1: 5.0 + i}, engine=name, model=entry, notes=())
        text = one.text.model_copy(update={"name": name})
        about = one.hardware.model_copy(update={"cpu": name})
        reports.append(diverging(one, kld, seed=i, text=text, hardware=about, notes=(name,)))
    made = joined([(name, Table(tuple(reports)))])
    artifacts = {name: Artifact(Path(name), manifest(name))}
    return page(View(made, artifacts, remarks=(name,), server=lambda _: name))
