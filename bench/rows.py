"""The rows of the comparison as data: what is run, in which environment, with which setting."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_SIZES = {"f": 64, "k": 128}


@dataclass(frozen=True)
class Row:
    """One conversion. `environment` None means quantkit's own command line with `options`."""

    name: str
    tool: str
    setting: str
    kind: str
    environment: str | None = None
    worker: str = ""
    bits: int = 4
    asym: bool = False
    options: tuple[str, ...] = ()
    warm_up: bool = False


def _ours(name: str, setting: str, kind: str, *options: str) -> Row:
    return Row(f"quantkit-{name}", "quantkit", setting, kind, options=options)


PEERS = (
    Row("gptqmodel-gptq-4", "GPTQModel", "GPTQ 4 sym", "gptq-4", "gptqmodel", "gptqmodel_gptq", warm_up=True),
    Row("autoround-4", "AutoRound", "200 steps, 4 sym", "refine", "gptqmodel", "autoround"),
    Row("gptqmodel-gptq-3", "GPTQModel", "GPTQ 3 sym", "gptq-3", "gptqmodel", "gptqmodel_gptq", bits=3, warm_up=True),
    Row("gptqmodel-gptq-2", "GPTQModel", "GPTQ 2 sym", "gptq-2", "gptqmodel", "gptqmodel_gptq", bits=2, warm_up=True),
    Row("autoround-2", "AutoRound", "200 steps, 2 sym", "gptq-2", "gptqmodel", "autoround", bits=2),
    Row("autoround-3", "AutoRound", "200 steps, 3 sym", "refine-3", "gptqmodel", "autoround", bits=3),
    Row("llmcompressor-gptq-4", "llm-compressor", "GPTQ 4 sym", "gptq-4", "llm-compressor", "llmcompressor_gptq"),
    Row("autoround-4-asym", "AutoRound", "200 steps, 4 asym", "refine-asym", "gptqmodel", "autoround", asym=True),
    Row("gptqmodel-awq-4", "GPTQModel", "AWQ 4", "awq", "gptqmodel", "gptqmodel_awq", asym=True, warm_up=True),
    Row("llmcompressor-awq-4", "llm-compressor", "AWQ 4", "awq", "llm-compressor", "llmcompressor_awq", asym=True),
    Row("llmcompressor-int8", "llm-compressor", "W8A8 int8", "int8", "llm-compressor", "llmcompressor_int8", bits=8),
    Row("autoawq-4", "AutoAWQ", "AWQ 4", "awq", "autoawq", "autoawq", asym=True),
)
GPTQ_4 = ("--method", "gptq", "--bits", "4")
AWQ_GPTQ_4 = ("--method", "awq", "--bits", "4")
OURS = (
    _ours("gptq-4", "GPTQ 4 sym", "gptq-4", *GPTQ_4),
    _ours("gptq-4-asym", "GPTQ 4 asym", "gptq-4-asym", *GPTQ_4, "--no-sym"),
    _ours("gptq-3", "GPTQ 3 sym", "gptq-3", "--method", "gptq", "--bits", "3"),
    _ours("gptq-2", "GPTQ 2 sym", "gptq-2", "--method", "gptq", "--bits", "2"),
    _ours("awq-4", "AWQ 4, nearest", "awq", *AWQ_GPTQ_4, "--rounding", "nearest"),
    _ours("int8", "W8A8 int8", "int8", "--method", "int8"),
    _ours("awq-gptq-4", "AWQ 4, then GPTQ", "awq-gptq", *AWQ_GPTQ_4),
    _ours("awq-gptq-refine-4", "AWQ 4, then GPTQ, refined", "awq-gptq-refine", *AWQ_GPTQ_4, "--refine"),
    _ours("refine-4", "GPTQ 4 sym, refined", "refine", *GPTQ_4, "--refine"),
    _ours("refine-3", "GPTQ 3 sym, refined", "refine-3", "--method", "gptq", "--bits", "3", "--refine"),
    _ours("refine-2", "GPTQ 2 sym, refined", "refine-2", "--method", "gptq", "--bits", "2", "--refine"),
    _ours("refine-4-asym", "GPTQ 4 asym, refined", "refine-asym", *GPTQ_4, "--refine", "--no-sym"),
)
ROWS = {row.name: row for row in (*OURS, *PEERS)}


@dataclass(frozen=True)
class Target:
    """The measure (kld, cpu_s or peak_gb) of our row is at most `share` of the least among the peers of its kind,
    or, with `fastest`, of the peer's with the fewest CPU seconds."""

    row: str
    kind: str
    measure: str
    share: float
    fastest: bool = False


TARGETS = (
    Target("quantkit-gptq-4", "gptq-4", "kld", 0.62),
    Target("quantkit-awq-4", "awq", "kld", 0.90),
    Target("quantkit-gptq-3", "gptq-3", "kld", 0.60),
    Target("quantkit-gptq-2", "gptq-2", "kld", 0.50),
    Target("quantkit-int8", "int8", "kld", 0.90),
    Target("quantkit-refine-4", "refine", "kld", 0.85),
    Target("quantkit-refine-4-asym", "refine-asym", "kld", 0.85),
    Target("quantkit-refine-4", "refine", "cpu_s", 0.50),
    Target("quantkit-refine-4-asym", "refine-asym", "cpu_s", 0.50),
    Target("quantkit-gptq-4", "gptq-4", "cpu_s", 0.40),
    Target("quantkit-gptq-4", "gptq-4", "peak_gb", 0.60, fastest=True),
)
