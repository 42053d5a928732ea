"""Which methods take a model that one method refuses: found by asking their own checks, so the hint is never wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from quantkit.calibration.tokens import context_notes
from quantkit.contracts.format import Content
from quantkit.contracts.method import Job, Method
from quantkit.contracts.registry import find_format, methods
from quantkit.errors import QuantkitError
from quantkit.models.config import torch_left_out
from quantkit.system.ranks import without_ranks

ASK = """import sys
from quantkit.conversion.alternatives import hint
from quantkit.conversion.check import prepare
from quantkit.records.recipe import ConvertRecipe
print(hint(prepare(ConvertRecipe.model_validate_json(sys.argv[1])), sys.argv[2]))"""
UNKNOWN = "`quantkit methods` lists the others."


def alternatives_to(job: Job, but: str = "", walked: bool = False) -> str:
    """A sentence that names METHOD:BITS whose checks take the job's source with default options; not the method `but`.

    `walked`: it was refused on its way through the model, where others that calibrate go, too. It costs all their
    checks, so it belongs into errors only. Where transformers came without torch, most checks cannot run in this
    process: another one asks them.
    """
    if not torch_left_out():
        return hint(job, but, walked)
    command = [sys.executable, "-P", "-c", ASK, job.recipe.model_dump_json(), but]
    ended = subprocess.run(command, capture_output=True, text=True, env=without_ranks(os.environ), check=False)
    return ended.stdout.strip() if ended.returncode == 0 else UNKNOWN


def hint(job: Job, but: str, walked: bool = False) -> str:
    """The sentence of `alternatives_to`, found in this process."""
    others = [method for name, method in methods().items() if name != but and method.makes is not Content.FLOATS]
    names = [f"{method.name}:{bits}" for method in others if (bits := _accepted_bits(method, job, walked))]
    if not names:
        return "No other method takes this model."
    return f"Methods that take this model: {', '.join(names)}."


def _accepted_bits(method: Method, job: Job, walked: bool) -> str | None:
    """The default bits, or else the first ones, that the method's check takes."""
    for bits in sorted(method.bits, key=lambda bits: bits != method.default_bits):
        recipe = job.recipe.model_copy(update={"method": method.name, "bits": bits, "options": {}, "format": None})
        kind, options = find_format(method.kind_of(bits)[1]), method.parse_options({})
        if method.refuse_config(job.source.config) or (walked and method.calibrated(options)):
            return None
        try:
            method.check(replace(job, recipe=recipe, method=method, format=kind, options=options))
            if method.calibrated(options):
                context_notes(recipe.calibration, job.source.config)
        except QuantkitError:
            continue
        return bits
    return None
