"""Memory: the process's peak resident memory while it loads the model, and while it generates; and on a card.

The peak on a card is what torch's allocator held at most, in total; engines that do not compute in torch give none.
"""

from __future__ import annotations

from quantkit.contracts.probe import Probe, ProbeJob
from quantkit.probes._generation import first_prompt, generate
from quantkit.report.records import Measurement
from quantkit.system.memory import device_peak_bytes, peak_rss_bytes


def _run(job: ProbeJob) -> list[Measurement]:
    generate(job, first_prompt(job), job.spec.new_tokens)
    generating = peak_rss_bytes()
    on_card = device_peak_bytes()
    card = [Measurement(name="device_peak_bytes", value=on_card, unit="bytes")] if on_card else []
    return [
        *card,
        Measurement(
            name="peak_rss_bytes",
            value=max(job.loading_peak, generating),
            unit="bytes",
            details={"loading": job.loading_peak, "generating": generating, "new_tokens": job.spec.new_tokens},
        ),
    ]


PROBE = Probe(
    name="memory",
    summary="peak resident memory of a process of its own that loads and generates",
    run=_run,
    order=5,
    generates=True,
)
