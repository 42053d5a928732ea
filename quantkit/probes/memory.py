"""Memory: the process's peak resident memory while it loads the model, and while it generates; and on a card.

The peak on a card is what torch's allocator held at most, in total; engines that do not compute in torch give none.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

from quantkit.contracts.registry import Probe, ProbeJob
from quantkit.probes.speed import first_prompt
from quantkit.report.records import Measurement


def peak_bytes() -> int:
    """Peak resident memory of this process in bytes.

    On Linux from VmHWM: ru_maxrss would count the parent's memory too, which the child shares until it starts.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def restart_peak() -> None:
    """Let `peak_bytes` count from now on, where the system can (Linux: 5 into clear_refs, see proc(5))."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def device_peak_bytes() -> int:
    """Most bytes that torch held on the card since the process began; 0 where torch does not compute on one."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.max_memory_allocated()) if torch is not None and torch.cuda.is_initialized() else 0


def _run(job: ProbeJob) -> list[Measurement]:
    for _ in job.model.stream(first_prompt(job), job.spec.new_tokens):
        pass
    generating = peak_bytes()
    on_card = device_peak_bytes()
    card = [Measurement(name="device_peak_bytes", value=on_card, unit="bytes")] if on_card else []
    return [
        *card,
        Measurement(
            name="peak_bytes",
            value=max(job.loading_peak, generating),
            unit="bytes",
            details={"loading": job.loading_peak, "generating": generating, "new_tokens": job.spec.new_tokens},
        ),
    ]


PROBE = Probe(
    name="memory",
    summary="peak resident memory of a fresh process that loads and generates",
    run=_run,
    order=5,
)
