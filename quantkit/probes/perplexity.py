"""Perplexity: exp of the mean negative log-likelihood over the scored tokens, with its standard error.

The error is llama.cpp's: PPL * sqrt((mean(nll^2) - mean(nll)^2) / (count - 1)).
"""

from __future__ import annotations

import math

import numpy as np

from quantkit.errors import EngineError
from quantkit.registry import Probe, ProbeJob
from quantkit.report import Measurement


def token_nll(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(P, V) float32 logits or log-probabilities, (P,) int64 targets -> (P,) float64 nll in nats."""
    import torch

    values = torch.from_numpy(logits)
    chosen = values.gather(1, torch.from_numpy(targets)[:, None])[:, 0]
    return (torch.logsumexp(values, 1) - chosen).to(torch.float64).numpy()


def summarize(nll: np.ndarray) -> tuple[float, float]:
    """(N,) nll -> perplexity and its standard error."""
    mean = float(nll.mean())
    variance = max(float((nll * nll).mean()) - mean * mean, 0.0)
    perplexity = math.exp(mean)
    return perplexity, perplexity * math.sqrt(variance / (len(nll) - 1))


def _run(job: ProbeJob) -> list[Measurement]:
    first = job.windows.first
    found: list[np.ndarray] = []
    with job.progress.step(f"perplexity ({job.windows.protocol})", len(job.tokens)) as advance:
        for window in job.tokens:
            logits = job.model.logits(window[None], first)[0]
            nll = token_nll(logits[:-1], window[first + 1 :])
            if not np.isfinite(nll).all():
                raise EngineError(
                    f"{job.subject.label}: the engine gave NaN or infinite values; the artifact is broken"
                )
            found.append(nll)
            advance(remark=f"{summarize(np.concatenate(found))[0]:.3f}")
    nll = np.concatenate(found)
    perplexity, stderr = summarize(nll)
    return [
        Measurement(
            name="perplexity",
            value=perplexity,
            unit="",
            n=len(nll),
            stderr=stderr,
            details={"mean_nll": float(nll.mean())},
        )
    ]


PROBE = Probe(name="perplexity", summary="perplexity by a named protocol", run=_run, order=30)
