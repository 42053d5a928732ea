"""The probes, in the order in which they run. A further one is a function and a row here; docs/probes.md."""

from __future__ import annotations

from quantkit.contracts.probe import Probe, ProbeJob
from quantkit.errors import RecipeError, near_miss
from quantkit.evaluation import speed
from quantkit.evaluation.perplexity import measure_perplexity
from quantkit.report.records import Measurement
from quantkit.system.memory import device_peak_bytes, peak_rss_bytes
from quantkit.system.sizes import bits_per_weight


def measure_size(job: ProbeJob) -> list[Measurement]:
    """Return the bytes of the weight files, and the bits per weight of the source model."""
    total = sum(path.stat().st_size for path in job.model.weight_files)
    parameters = job.model.parameters
    return [
        Measurement(name="weight_bytes", value=total, unit="bytes", n=len(job.model.weight_files)),
        Measurement(name="bits_per_weight", value=bits_per_weight(total, parameters), unit="bits", n=parameters),
    ]


def measure_memory(job: ProbeJob) -> list[Measurement]:
    """Return the peak resident memory of the process while it loads the model and generates, and the peak on a GPU.

    The peak on a GPU is that of torch's allocator; engines that do not compute in torch have none.
    """
    speed.generate(job, speed.first_prompt(job), job.spec.new_tokens)
    generating, on_gpu = peak_rss_bytes(), device_peak_bytes()
    details = {"loading": job.loading_peak, "generating": generating, "new_tokens": job.spec.new_tokens}
    peak = max(job.loading_peak, generating)
    return [
        *([Measurement(name="device_peak_bytes", value=on_gpu, unit="bytes")] if on_gpu else []),
        Measurement(name="peak_rss_bytes", value=peak, unit="bytes", details=details),
    ]


PROBES = {
    probe.name: probe
    for probe in (
        Probe("size", measure_size),
        Probe("memory", measure_memory, generates=True),
        Probe("speed", speed.measure_speed, generates=True, per_threads=True),
        Probe(
            "throughput", speed.measure_throughput, generates=True, per_threads=True, n_ctx=speed.READ + 1, usual=False
        ),
        Probe(
            "answers", speed.measure_answers, generates=True, per_threads=True, n_ctx=speed.ANSWER_TOKENS, usual=False
        ),
        Probe("perplexity", measure_perplexity, needs_source=True),
    )
}


def find_probe(name: str) -> Probe:
    """Look a probe up; raises RecipeError with a near-miss hint."""
    if name not in PROBES:
        raise RecipeError(f"unknown probe {name!r}.{near_miss(name, PROBES)} Known: {', '.join(sorted(PROBES))}.")
    return PROBES[name]
