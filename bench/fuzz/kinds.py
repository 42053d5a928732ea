"""The kinds of inputs, by name."""

from __future__ import annotations

from bench.fuzz import artifacts, files, kept, quantized, sources
from bench.fuzz.case import Kind

KINDS: dict[str, Kind] = {**sources.KINDS, **quantized.KINDS, **artifacts.KINDS, **files.KINDS, **kept.KINDS}
