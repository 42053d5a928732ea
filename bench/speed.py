"""`make bench-speed`: what each artifact of the demo model costs to run, in process and behind its server.

Prints the table of tokens/s, prompt and generation throughput, time to first token and peak memory at each number of
threads; the ratio of generation to that of the source in bfloat16, measured in turns; and the server's tokens/s over
the network. Writes bench/results/speed.json; exit code 1 names the targets missed.

python -m bench.speed [--threads 1,2] [--rounds 3] [--duration 20]      # all engines in process, llama.cpp's server
python -m bench.speed --server                                          # llama.cpp's server only
python -m bench.speed --vllm                                            # vLLM, from an environment of its own
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
from typing import Any

from rich.console import Console

from bench.demo_artifacts import artifact, folder, quantkit_command, told
from bench.environments import python_of
from bench.folders import RESULTS, BenchError
from quantkit.errors import QuantkitError
from quantkit.records.recipe import LoadTestSpec
from quantkit.records.report import Report, read_report
from quantkit.report.table import Table
from quantkit.serving.client import Endpoint
from quantkit.serving.launch import serving
from quantkit.serving.load_test import LoadReport, run_load_test
from quantkit.serving.servers import plan_server

SOURCE = "demo"
ARTIFACTS = ("gptq 4", "awq 4", "nf4", "ctranslate2 int8", "Q4_K_M")
FASTER = {"gptq 4": 1.6, "awq 4": 1.6}  # than the source in bfloat16, at one thread
SERVED = "Q4_K_M"
NEAR = 0.15  # of the in-process probe
CONCURRENCIES = (1, 4)


def main() -> int:
    """Run all parts; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=3, help="of the ratio, in turns (default: %(default)s)")
    parser.add_argument("--duration", type=float, default=20.0, help="of load, in seconds (default: %(default)s)")
    parser.add_argument("--server", action="store_true", help="only llama.cpp's server; other figures are kept")
    parser.add_argument("--vllm", action="store_true", help="only vLLM on the GPTQ artifact, server and in process")
    asked = parser.parse_args()
    path = RESULTS / ("vllm.json" if asked.vllm else "speed.json")
    try:
        result = (_vllm if asked.vllm else _server if asked.server else _all)(asked)
    except (BenchError, QuantkitError) as error:
        print(error, file=sys.stderr)
        return 1
    if asked.server and path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
        result = kept | result | {"missed": kept["missed"] | result["missed"]}
    RESULTS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    lines = [line for part in result["missed"].values() for line in part]
    for line in lines:
        print("MISSED", line)
    return 1 if lines else 0


def _all(asked: argparse.Namespace) -> dict[str, Any]:
    """Figures; under "missed" the missed targets of each part, so that one run again takes back only its own."""
    models = {SOURCE: SOURCE} | {name: artifact(name, 1) for name in ARTIFACTS}
    reports = {name: _report(name, model, asked.threads) for name, model in models.items()}
    Table(tuple(reports.values())).show(Console(width=200))
    ratios, missed = _ratios(models, asked.rounds)
    server = _server(asked)
    return {
        "reports": {name: report.model_dump() for name, report in reports.items()},
        "generation_ratio": ratios,
        **server,
        "missed": {"generation": missed, **server["missed"]},
    }


def _server(asked: argparse.Namespace) -> dict[str, Any]:
    """llama.cpp's server over the network, and in process: at the fewest threads, so that both sides have a core."""
    model, least = artifact(SERVED, 1), min(int(n) for n in asked.threads.split(","))
    served = {n: _served(model, "llamacpp", n, least, asked.duration) for n in CONCURRENCIES}
    # The same prompts at the same number of threads, right after the server's turn.
    alone = _report(SERVED, model, str(least))
    rate = _value(alone, f"answers_tokens@{least}") / _value(alone, f"answers_seconds@{least}")
    over = _value(served[1], "output_tokens_per_second")
    missed = []
    print(
        f"{SERVED} at {least} threads: {over:.1f} tokens/s over the network, {rate:.1f} in process, {over / rate:.3f}x"
    )
    if abs(over / rate - 1) > NEAR:
        missed.append(f"{SERVED}: {over / rate:.3f}x of the in-process probe over the network, within {NEAR} asked")
    return {
        "served": {n: report.model_dump() for n, report in served.items()},
        "in_process_tokens_per_second": rate,
        "missed": {"server": missed},
    }


def _vllm(asked: argparse.Namespace) -> dict[str, Any]:
    python = str(python_of("vllm"))
    most = max(int(n) for n in asked.threads.split(","))
    served = {n: _served(artifact("gptq 4", 1), "vllm", n, most, asked.duration, python) for n in CONCURRENCIES}
    missed = [f"vLLM at concurrency {n}: {r.counts}" for n, r in served.items() if r.failed or not r.completed]
    alone = _report("gptq 4 in vLLM", artifact("gptq 4", 1), asked.threads, "--engine", "vllm", "--python", python)
    Table((alone,)).show(Console(width=200))
    return {
        "served": {n: report.model_dump() for n, report in served.items()},
        "in_process": alone.model_dump(),
        "missed": {"vllm": missed},
    }


def _report(name: str, model: str, threads: str, *options: str) -> Report:
    path = folder() / "speed.json"
    told(f"bench {name}", [quantkit_command(), "bench", model, "--threads", threads, "--json", str(path), *options], 1)
    return read_report(path)


def _ratios(models: dict[str, str], rounds: int) -> tuple[dict[str, Any], list[str]]:
    """Generation (tg128) at one thread of each artifact with a target, and of the source, in turns."""
    rates: dict[str, list[float]] = {name: [] for name in (SOURCE, *FASTER)}
    for _ in range(rounds):
        for name, found in rates.items():
            path = folder() / "turn.json"
            told(
                f"generate {name}",
                [
                    *(quantkit_command(), "eval", models[name], "--probes", "throughput", "--threads", "1"),
                    *("--limit", "1", "--json", str(path)),
                ],
                1,
            )
            found.append(_value(read_report(path), "tg128@1"))
    ratios = {name: statistics.median(rates[name]) / statistics.median(rates[SOURCE]) for name in FASTER}
    missed = []
    for name, least in FASTER.items():
        print(f"{name}: generates {ratios[name]:.2f} times as fast as the source in bfloat16, at one thread")
        if ratios[name] < least:
            missed.append(f"{name}: {ratios[name]:.2f} times the source's tokens/s, at least {least}")
    return {"tokens_per_second": rates, "ratio": ratios}, missed


def _served(
    model: str, engine: str, concurrency: int, threads: int, seconds: float, python: str | None = None
) -> LoadReport:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = plan_server(model, engine, port=port, n_ctx=2048, threads=threads, python=python, name="served")
    with serving(launch):
        report = run_load_test(Endpoint(launch.url, "served"), LoadTestSpec(concurrency=concurrency, duration=seconds))
    ttft = report.find("ttft_ms")
    print(
        f"{engine} at concurrency {concurrency}: {_value(report, 'output_tokens_per_second'):.1f} tokens/s, "
        f"first token {ttft.value if ttft else float('nan'):.0f} ms, {report.counts}"
    )
    return report


def _value(report: Report | LoadReport, name: str) -> float:
    found = report.find(name)
    if found is None:
        raise BenchError(f"no figure {name} was measured")
    return found.value


if __name__ == "__main__":
    raise SystemExit(main())
