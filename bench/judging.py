"""`make bench-judge`: quantkit's figures of quality beside those of each native tool, on the demo model.

Each figure comes from a process of its own. Ours are what `quantkit eval-ppl` writes. Prints three tables, writes
bench/results/judge.json, and exits 1 naming the targets missed.

python -m bench.judging [--parts throughput] [--windows 64] [--papers 4] [--pages 4] [--repeats 3] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.demo_artifacts import ARTIFACTS, artifact, folder, quantkit_command, told
from bench.folders import REPOSITORY, RESULTS, BenchError, evaluation_text
from quantkit.data.demo import demo_folder
from quantkit.data.texts import pages as cut_pages

JUDGES = REPOSITORY / "bench" / "judges"
SELF_KLD, ROUNDING = 1e-5, 1e-5  # nats
FASTER, NOT_SLOWER = 1.3, 0.95
CONTEXT = 2048  # of lm-eval, for both


class _Bench:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.model = str(demo_folder())
        self.text = str(evaluation_text())

    def artifact(self, name: str) -> str:
        """The folder of an artifact, made once."""
        return artifact(name, self.asked.threads)

    def ours(self, model: str, protocol: str, *options: str) -> dict[str, Any]:
        """The figures of `quantkit eval-ppl` by name, and what the process took."""
        path = folder() / "report.json"
        done = told(
            f"judge {model}",
            [
                *(quantkit_command(), "eval-ppl", model, "--text", self.text, "--protocol", protocol),
                *("--json", str(path), *options),
            ],
            self.asked.threads,
        )
        report = json.loads(path.read_text(encoding="utf-8"))
        found = {m["name"]: m for m in report["measurements"]}
        return found | {"baseline": report["baseline"], "peak_gb": done.peak_gb}

    def theirs(self, script: str, *arguments: object) -> dict[str, Any]:
        """What one of the scripts in bench/judges prints, and its peak memory."""
        command = [sys.executable, str(JUDGES / f"{script}.py"), *map(str, arguments)]
        done = told(script, command, self.asked.threads)
        found: dict[str, Any] = json.loads([line for line in done.output.splitlines() if line.startswith("{")][-1])
        return found | {"peak_gb": done.peak_gb}


def main() -> int:
    """Run all parts; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s; others are kept as they are")
    parser.add_argument("--windows", type=int, default=64, help="of 512 tokens (default: %(default)s)")
    parser.add_argument("--papers", type=int, default=4, help="windows of 2048 tokens (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=4, help="of lm-eval (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each timing (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    if unknown := set(asked.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: no {', '.join(unknown)}; there are {', '.join(PARTS)}")
    path = RESULTS / "judge.json"
    result: dict[str, Any] = {}
    if path.is_file() and asked.parts != ",".join(PARTS):
        result = json.loads(path.read_text(encoding="utf-8"))
    # By part, so that one that is run again takes back only what it had missed itself.
    missed: dict[str, list[str]] = result.setdefault("missed", {})
    try:
        bench = _Bench(asked)
        for name in asked.parts.split(","):
            result[name], missed[name] = PARTS[name](bench)
            # After each part: one that fails does not take the figures before it along.
            RESULTS.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    lines = [line for part in missed.values() for line in part]
    for line in lines:
        print("MISSED", line)
    return 1 if lines else 0


def _native_tools(bench: _Bench) -> tuple[list[dict[str, Any]], list[str]]:
    windows = ("--limit", str(bench.asked.windows))
    rows: list[dict[str, Any]] = []

    def row(figure: str, ours: float, theirs: float, most: float, how: str) -> None:
        rows.append({"figure": figure, "ours": ours, "theirs": theirs, "most": most, "how": how})

    for name in ("F16", "Q4_K_M"):
        made = bench.artifact(name)
        file = next(Path(made).glob("*.gguf"))
        theirs = bench.theirs("llama_perplexity", file, bench.text, bench.asked.windows, bench.asked.threads)
        ours = bench.ours(made, "llama.cpp", *windows, "--no-divergence")["perplexity"]
        row(f"{name}, llama.cpp", ours["value"], theirs["perplexity"], 5e-5, "llama-perplexity, same engine")
        row(f"{name}, llama.cpp, its error", ours["stderr"], theirs["stderr"], 5e-4, "llama-perplexity, same engine")
        if name == "F16":
            other = bench.ours("demo", "llama.cpp", *windows, "--no-divergence", "--dtype", "float32")["perplexity"]
            row("source, llama.cpp", other["value"], theirs["perplexity"], 1e-3, "llama-perplexity on F16")
    pages = folder() / "pages.jsonl"
    found = cut_pages(Path(bench.text).read_text(encoding="utf-8"))
    pages.write_text("".join(json.dumps({"page": page}) + "\n" for page in found), encoding="utf-8")
    theirs = bench.theirs("harness", bench.model, pages, bench.asked.pages, CONTEXT, "float32")
    limits = ("--limit", str(bench.asked.pages), "--n-ctx", str(CONTEXT))
    ours = bench.ours("demo", "lm-eval", *limits, "--no-divergence", "--dtype", "float32")
    for name, value in theirs.items():
        if name in ours and name != "peak_gb":
            row(f"source, {name}", ours[name]["value"], value, 5e-5, "lm-evaluation-harness")
    theirs = bench.theirs(
        "plain_loop", bench.model, bench.text, bench.asked.papers, 2048, "float32", bench.asked.threads
    )
    ours = bench.ours("demo", "papers", "--limit", str(bench.asked.papers), "--no-divergence", "--dtype", "float32")
    row("source, papers", ours["perplexity"]["value"], theirs["perplexity"], 5e-6, "plain transformers loop")
    grid = Table("figure", "quantkit", "other", "relative difference", "at most", "other is", title="The same number?")
    missed = []
    for r in rows:
        apart = abs(r["ours"] / r["theirs"] - 1)
        grid.add_row(
            r["figure"], f"{r['ours']:.6f}", f"{r['theirs']:.6f}", f"{apart:.1e}", f"{r['most']:.0e}", r["how"]
        )
        if apart > r["most"]:
            missed.append(f"{r['figure']}: {apart:.1e} from {r['how']}, at most {r['most']:.0e}")
    Console(width=160).print(grid)
    return rows, missed


def _divergences(bench: _Bench) -> tuple[list[dict[str, Any]], list[str]]:
    windows = ("--limit", str(bench.asked.windows))
    rows, missed = [], []
    models = {"source in float32": ("demo", "--dtype", "float32"), "source in bfloat16": ("demo",)}
    models |= {name: (bench.artifact(name), "--source", bench.model) for name in ARTIFACTS}
    grid = Table("artifact", "MB", "KLD ± se", "99th percentile", "same top token", "ln(PPL / source's)", title="KLD")
    baseline: dict[str, Any] = {}
    for name, (model, *options) in models.items():
        ours = bench.ours(model, "llama.cpp", *windows, *options)
        baseline = ours["baseline"]
        kld, top, ratio = ours["kld"], ours["same_top_p"], ours["ln_perplexity_ratio"]
        files = [*Path(model).glob("*.safetensors"), *Path(model).glob("*.gguf"), *Path(model).glob("model.bin")]
        size = sum(file.stat().st_size for file in files) / 1e6
        rows.append({"artifact": name, "megabytes": size, "kld": kld, "same_top_p": top, "ln_perplexity_ratio": ratio})
        grid.add_row(
            name, f"{size:.1f}" if size else "", f"{kld['value']:.6f} ± {kld['stderr']:.6f}",
            f"{kld['details']['p99']:.4f}", f"{100 * top['value']:.2f} %",
            f"{ratio['value']:.5f} ± {ratio['stderr']:.5f}",
        )  # fmt: skip
        if name == "source in float32" and abs(kld["value"]) > SELF_KLD:
            missed.append(f"KLD of the source against itself {kld['value']:.1e}, at most {SELF_KLD:.0e}")
    Console(width=160).print(grid)
    print(f"float16 in the baseline costs {baseline['rounding']:.1e} nats; noise floor {baseline['noise']:.1e}")
    if baseline["rounding"] > ROUNDING:
        missed.append(f"float16 in the baseline costs {baseline['rounding']:.1e} nats, at most {ROUNDING:.0e}")
    return rows, missed


def _throughput(bench: _Bench) -> tuple[list[dict[str, Any]], list[str]]:
    """Tokens per second of the windows alone, in turns; medians of the repeats."""
    asked = bench.asked
    file = next(Path(bench.artifact("Q4_K_M")).glob("*.gguf"))
    pairs = {
        "papers, 2048, source in bfloat16": (
            ("demo", "papers", str(asked.papers)),
            ("plain_loop", bench.model, bench.text, asked.papers, 2048, "bfloat16", asked.threads),
            FASTER,
        ),
        "papers, 512, source in bfloat16": (
            ("demo", "papers", str(asked.windows), "--n-ctx", "512"),
            ("plain_loop", bench.model, bench.text, asked.windows, 512, "bfloat16", asked.threads),
            FASTER,
        ),
        "llama.cpp, 512, Q4_K_M": (
            (bench.artifact("Q4_K_M"), "llama.cpp", str(asked.windows)),
            ("llama_perplexity", file, bench.text, asked.windows, asked.threads),
            NOT_SLOWER,
        ),
    }
    rows, missed = [], []
    grid = Table("what", "quantkit tokens/s", "other tokens/s", "ratio", "at least", "peak GB", title="Throughput")
    for name, ((model, protocol, limit, *more), other, least) in pairs.items():
        ours, theirs, peaks = [], [], (0.0, 0.0)
        for _ in range(asked.repeats):
            mine = bench.ours(model, protocol, "--limit", limit, "--no-divergence", *more)
            his = bench.theirs(*other)
            details = mine["perplexity"]["details"]
            ours.append(details["tokens_per_second"])
            theirs.append(his["tokens_per_second"])
            peaks = (max(peaks[0], details["peak_rss_bytes"] / 1e9), max(peaks[1], his["peak_gb"]))
        ratio = statistics.median(ours) / statistics.median(theirs)
        rows.append({"what": name, "ours": ours, "theirs": theirs, "ratio": ratio, "peak_gb": peaks})
        grid.add_row(
            name, f"{statistics.median(ours):.0f}", f"{statistics.median(theirs):.0f}", f"{ratio:.2f}", f"{least}",
            f"{peaks[0]:.2f}, {peaks[1]:.2f}",
        )  # fmt: skip
        if ratio < least:
            missed.append(f"throughput, {name}: {ratio:.2f} of the other's, at least {least}")
    Console(width=160).print(grid)
    return rows, missed


PARTS = {"native_tools": _native_tools, "divergences": _divergences, "throughput": _throughput}

if __name__ == "__main__":
    raise SystemExit(main())
