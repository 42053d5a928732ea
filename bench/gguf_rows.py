"""`make bench-gguf`: K-quants by llama.cpp's two steps, by the one pass, and better ones at the same bytes.

For each preset: what llama.cpp gives without and with an importance matrix, quantkit's `rounding: gptq` with the same
types, and with types chosen for the same size. Tensors of the first two are held byte for byte against llama.cpp's own
quantizer, and time and peak memory against its two steps. All are judged by llama.cpp's protocol, n_ctx 512. The mixes
of IQ types come with importance alone, and IQ3_M alone of them is judged.

python -m bench.gguf_rows [--models k,f] [--presets Q2_K,...] [--windows 64] [--threads 1] [--fresh]
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.environments import peer_variables
from bench.folders import REPOSITORY, RESULTS, BenchError, calibration_text, work_folder
from bench.llama_source import llama_cpp_source
from bench.measure import Run, run
from bench.run_peers import LENGTH, LIMIT_S, SEQUENCES, said_by
from quantkit.formats.gguf.file_types import IQ_MIXES

PRESETS = ("Q2_K", "Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", *IQ_MIXES)
JUDGED = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q6_K", "IQ3_M")
KINDS = {"plain": "llama.cpp", "imatrix": "llama.cpp, imatrix", "best": "best, same types", "chosen": "best, chosen"}
# Of the divergence of llama.cpp with importance, at most.
TARGETS = {
    ("Q2_K", "best"): 0.80,
    ("Q3_K_M", "best"): 0.88,
    ("Q4_K_M", "best"): 0.95,
    ("Q2_K", "chosen"): 0.70,
    ("Q3_K_M", "chosen"): 0.75,
    ("Q4_K_M", "chosen"): 0.82,
    ("Q6_K", "chosen"): 0.95,
    ("IQ3_M", "chosen"): 0.60,
}
CHOSEN_OF_BEST = 0.9  # of the divergence of `best` in the preset of the same size, at most
WALL, PEAK = 0.7, 0.5  # of llama.cpp's two steps, at most; the time of K-quants alone, which have a search of our own


def main() -> int:
    """Run what has no result yet, print the tables; 1 where a target is missed."""
    asked = _arguments()
    bench = _Bench(asked.windows, asked.threads, asked.fresh)
    try:
        for model in asked.models.split(","):
            for preset in asked.presets.split(","):
                for kind in _kinds(preset, asked.kinds.split(",")):
                    bench.row(model, preset, kind)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    missed = bench.report()
    for line in missed:
        print("MISSED", line)
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="k,f", help="default: %(default)s")
    parser.add_argument("--presets", default=",".join(PRESETS), help="default: %(default)s")
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument("--windows", type=int, default=64, help="windows of 512 tokens (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--fresh", action="store_true", help="measure again what has a result")
    return parser.parse_args()


def _kinds(preset: str, asked: list[str]) -> list[str]:
    """Those that are measured of a preset: most of the IQ types exist with importance alone."""
    unmeasured = {"plain"} if preset in IQ_MIXES else set()
    if preset not in JUDGED:
        unmeasured |= {"best", "chosen"}
    return [kind for kind in asked if kind not in unmeasured]


class _Bench:
    def __init__(self, windows: int, threads: int, fresh: bool) -> None:
        self._setting, self._fresh = {"windows": windows, "threads": threads}, fresh
        self._folder, self._work = RESULTS / "gguf", work_folder() / "gguf"
        self._variables = peer_variables(threads)

    def row(self, model: str, preset: str, kind: str) -> None:
        """Convert, compare with llama.cpp's bytes, judge; keep the result."""
        path = self._folder / f"{model}-{preset}-{kind}.json"
        if self._kept(path) is not None and not self._fresh:
            return
        print(f"{model} {preset} {kind}: {datetime.now(UTC):%H:%M} UTC", flush=True)
        checkpoint, out = said_by("bench.models", model), self._work / f"{model}-{preset}-{kind}"
        done = self._run("convert", [*self._convert(model, checkpoint, preset, kind), "--out", str(out), "--force"])
        result: dict[str, Any] = {"model": model, "preset": preset, "kind": kind, **self._setting}
        result |= {"cpu_s": done.cpu_s, "wall_s": done.wall_s, "peak_gb": done.peak_gb, "bytes": _size(out)}
        if kind in ("plain", "imatrix"):
            result |= self._against_llama_cpp(model, checkpoint, preset, kind, out)
        if preset in JUDGED:
            result |= self._judge(checkpoint, out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"  {json.dumps(result)}", flush=True)

    def _kept(self, path: Path) -> dict[str, Any] | None:
        """The result, if there is one of the same windows and threads: others cannot be compared."""
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return found if self._setting.items() <= found.items() else None

    def _convert(self, model: str, checkpoint: str, preset: str, kind: str) -> list[str]:
        bits = ["--bits", "auto" if kind == "chosen" else preset]
        options = ["--rounding", "gptq"] if kind in ("best", "chosen") else []
        if kind == "imatrix":
            options = ["--imatrix-file", str(self._imatrix(model, checkpoint))]
        if kind == "chosen":
            options += ["--target-size", str(self._size_of(model, preset))]
        return [_quantkit(), "convert", checkpoint, "--method", "gguf", *bits, *options, *_calibration()]

    def _size_of(self, model: str, preset: str) -> int:
        kind = _kinds(preset, list(KINDS))[0]
        first = self._kept(self._folder / f"{model}-{preset}-{kind}.json")
        if first is None:
            raise BenchError(f"chosen types need the size of {preset}: run the kind {kind} first")
        return int(first["bytes"])

    def _imatrix(self, model: str, checkpoint: str) -> Path:
        path = self._work / f"{model}.imatrix.gguf"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._run("imatrix", [_quantkit(), "imatrix", checkpoint, "--out", str(path), *_calibration()])
        return path

    def _against_llama_cpp(self, model: str, checkpoint: str, preset: str, kind: str, out: Path) -> dict[str, Any]:
        """llama.cpp's own two steps: its converter to BF16, then its quantizer; are the tensors the same?"""
        base, theirs = self._work / f"{model}-BF16.gguf", self._work / f"{model}-{preset}-two-steps.gguf"
        converter = llama_cpp_source()
        command = [sys.executable, str(converter / "convert_hf_to_gguf.py"), checkpoint, "--outtype", "bf16"]
        variables = {"PYTHONPATH": str(converter / "gguf-py")}
        first = self._run("first-step", [*command, "--outfile", str(base)], variables)
        weighted = ["--imatrix", str(self._imatrix(model, checkpoint))] if kind == "imatrix" else []
        step = [sys.executable, "-m", "bench.llama_quantize"]
        files = [str(base), str(theirs), preset, "--threads", str(self._setting["threads"])]
        second = self._run("second-step", [*step, *files, *weighted])
        compared = self._run("compare", [*step, "--compare", str(_file(out)), str(theirs)])
        found = {
            "two_steps_wall_s": first.wall_s + second.wall_s,
            "two_steps_peak_gb": max(first.peak_gb, second.peak_gb),
            "intermediate_bytes": base.stat().st_size,
            **json.loads(compared.output.strip().splitlines()[-1]),
        }
        theirs.unlink()
        return found

    def _judge(self, checkpoint: str, out: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "bench.judge", "--model", checkpoint, "--artifact", str(out)]
        command += ["--protocol", "llama.cpp"]
        for option, value in self._setting.items():
            command += [f"--{option}", str(value)]
        done = self._run("judge", [*command, "--save", str(self._divergences(out))])
        found: dict[str, Any] = json.loads(done.output.strip().splitlines()[-1])
        return found

    def _divergences(self, out: Path) -> Path:
        return out.with_name(out.name + ".kld.pt")

    def _run(self, name: str, command: list[str], variables: dict[str, str] | None = None) -> Run:
        done = run(command, self._variables | (variables or {}), self._work / f"{name}.log", LIMIT_S, REPOSITORY)
        if done.code:
            raise BenchError(f"{' '.join(command)}: {done.reason}")
        return done

    def report(self) -> list[str]:
        """Print all results of this setting; the missed targets."""
        rows = [row for path in sorted(self._folder.glob("*-*-*.json")) if (row := self._kept(path)) is not None]
        (RESULTS / "gguf.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        by = {(row["model"], row["preset"], row["kind"]): row for row in rows}
        table = Table(title="GGUF: llama.cpp's protocol, n_ctx 512 (KLD and perplexity: less is better)")
        for column in ("model", "preset", "kind", "MB", "KLD ± se", "of imatrix", "perplexity", "CPU s", "peak GB"):
            table.add_column(column)
        missed: list[str] = []
        for (model, preset, kind), row in by.items():
            reference = by.get((model, preset, "imatrix"))
            share = ""
            if "kld" in row and reference is not None:
                share = f"{row['kld'] / reference['kld']:.3f} ± {self._paired(model, preset, kind):.3f}"
            table.add_row(
                *(model, preset, KINDS[kind], f"{row['bytes'] / 1e6:.1f}"),
                f"{row['kld']:.4f} ± {row['kld_se']:.4f}" if "kld" in row else "",
                share,
                f"{row['perplexity']:.3f}" if "kld" in row else "",
                *(f"{row['cpu_s']:.0f}", f"{row['peak_gb']:.2f}"),
            )
            missed += _missed(row, by)
        Console(width=160).print(table)
        return missed

    def _paired(self, model: str, preset: str, kind: str) -> float:
        """Standard error of the mean difference of two rows' divergences at the same positions, as a share."""
        import torch  # here: a process that is started counts the memory of the one that starts it

        ours, theirs = (
            torch.load(self._divergences(self._work / f"{model}-{preset}-{k}"), weights_only=True)
            for k in (kind, "imatrix")
        )
        return float((ours - theirs).std() / len(ours) ** 0.5 / theirs.mean())


def _missed(row: dict[str, Any], by: dict[tuple[str, str, str], dict[str, Any]]) -> list[str]:
    model, preset, kind = row["model"], row["preset"], row["kind"]
    name, lines = f"{model} {preset} {kind}", []
    if "different" in row:
        if row["different"]:
            lines.append(f"{name}: {row['different']} of {row['tensors']} tensors differ from llama.cpp's")
        for measure, most in (("wall_s", WALL), ("peak_gb", PEAK)):
            share = row[measure] / row[f"two_steps_{measure}"]
            if share > most and not (measure == "wall_s" and preset in IQ_MIXES):
                lines.append(f"{name}: {measure} {share:.2f} of two steps, at most {most} asked")
    asked, reference = TARGETS.get((preset, kind)), by.get((model, preset, "imatrix"))
    if asked is not None and reference is not None and row["kld"] > asked * reference["kld"]:
        lines.append(f"{name}: KLD {row['kld'] / reference['kld']:.3f} of llama.cpp's with importance, at most {asked}")
    best = by.get((model, preset, "best"))
    if kind == "chosen" and best is not None and row["kld"] > CHOSEN_OF_BEST * best["kld"]:
        lines.append(f"{name}: KLD {row['kld'] / best['kld']:.3f} of ours at the preset, at most {CHOSEN_OF_BEST}")
    return lines


def _quantkit() -> str:
    return str(Path(sys.executable).parent / "quantkit")


def _calibration() -> list[str]:
    return [
        *("--calibration-text", str(calibration_text()), "--calibration-sequences", str(SEQUENCES)),
        *("--calibration-length", str(LENGTH)),
    ]


def _file(folder: Path) -> Path:
    return next(folder.glob("*.gguf"))


def _size(folder: Path) -> int:
    return _file(folder).stat().st_size


if __name__ == "__main__":
    raise SystemExit(main())
