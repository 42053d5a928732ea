"""Size: bytes of the weight files, and bits per weight of the source model's weights."""

from __future__ import annotations

from quantkit.contracts.probe import Probe, ProbeJob
from quantkit.report.records import Measurement
from quantkit.system.sizes import bits_per_weight


def _run(job: ProbeJob) -> list[Measurement]:
    total = sum(path.stat().st_size for path in job.model.weight_files)
    parameters = job.model.parameters
    return [
        Measurement(name="weight_bytes", value=total, unit="bytes", n=len(job.model.weight_files)),
        Measurement(name="bits_per_weight", value=bits_per_weight(total, parameters), unit="bits", n=parameters),
    ]


PROBE = Probe(name="size", summary="bytes of the weight files, bits per weight", run=_run, order=0)
