"""Convert two models with quantkit and with its peers, judge all artifacts alike, print one table, check the targets.

python -m bench.run_peers [--models f,k] [--rows NAME,...] [--sequences 128] [--threads 1] [--fresh]
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.environments import peer_variables, python_of
from bench.folders import REPOSITORY, RESULTS, BenchError, calibration_text, evaluation_text, work_folder
from bench.measure import Run, run
from bench.rows import GROUP_SIZES, ROWS, Row
from bench.table import missed_targets, print_table

LIMIT_S = 3 * 3600
JUDGE_LIMIT_S = 3600
WINDOWS = 20
SEQUENCES = 128
LENGTH = 512
JUDGE_FAILED = "its artifact cannot be judged"


def main() -> int:
    """Run what is asked; 1 where a target is missed."""
    asked = _arguments()
    try:
        calibration_text()
        evaluation_text()
        keys = [(model, ROWS[name]) for model in asked.models.split(",") for name in asked.rows.split(",")]
        for model, row in keys:
            if asked.fresh or _finished(model, row, asked.sequences) is None or _waiting(model, row, asked.sequences):
                _convert_and_judge(model, row, asked)
    except (BenchError, KeyError) as error:
        print(error if isinstance(error, BenchError) else f"no such row or model: {error}", file=sys.stderr)
        return 1
    models = asked.models.split(",")
    results = [found for model in models for row in ROWS.values() if (found := _finished(model, row, asked.sequences))]
    (RESULTS / "peers.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print_table(results)
    missed = missed_targets(results, set(asked.rows.split(",")))
    for line in missed:
        print(line)
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(GROUP_SIZES), help="f, k or both (default: %(default)s)")
    parser.add_argument("--rows", default=",".join(ROWS), help="names of rows; default: all of %(default)s")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="of calibration (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of every tool (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="run rows again that have a result")
    return parser.parse_args()


def _result_file(model: str, row: Row) -> Path:
    return RESULTS / "peers" / f"{model}-{row.name}.json"


def _artifact(model: str, row: Row) -> Path:
    return work_folder() / "artifacts" / f"{model}-{row.name}"


def _measured_file(model: str, row: Row) -> Path:
    artifact = _artifact(model, row)
    return artifact.with_name(artifact.name + ".json")


def _finished(model: str, row: Row, sequences: int) -> dict[str, Any] | None:
    """The row's result, if it was calibrated on as many sequences."""
    return _read(_result_file(model, row), sequences)


def _waiting(model: str, row: Row, sequences: int) -> dict[str, Any] | None:
    """What was measured of an artifact that was made on as many sequences and that no judge has read yet."""
    return _read(_measured_file(model, row), sequences)


def _read(path: Path, sequences: int) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found if found and found.get("sequences", SEQUENCES) == sequences else None


def _convert_and_judge(model: str, row: Row, asked: argparse.Namespace) -> None:
    """Convert (unless an artifact waits to be judged), judge, write the row's result."""
    folder, measured = _artifact(model, row), _measured_file(model, row)
    if asked.fresh:
        measured.unlink(missing_ok=True)
    print(f"{model} {row.name}: {datetime.now(UTC):%H:%M} UTC", flush=True)
    result = _waiting(model, row, asked.sequences)
    if result is None:
        result = _convert(model, row, folder, asked.threads, asked.sequences)
        _write(measured, result)
    if "reason" not in result:
        result |= _judge(model, folder, asked.threads)
    _write(_result_file(model, row), result)
    if JUDGE_FAILED not in result.get("reason", ""):
        measured.unlink()
    print(f"  {_in_short(result)}", flush=True)


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _convert(model: str, row: Row, folder: Path, threads: int, sequences: int) -> dict[str, Any]:
    checkpoint = Path(said_by("bench.models", model))
    result: dict[str, Any] = {
        "model": checkpoint.name,
        "key": model,
        "row": row.name,
        "tool": row.tool,
        "setting": row.setting,
        "kind": row.kind,
        "group_size": GROUP_SIZES[model],
        "sequences": sequences,
        "threads": threads,
        "machine": _machine(),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
    }
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(folder.name + ".log")
    try:
        command = _command(row, checkpoint, folder, threads, sequences)
        if row.warm_up:
            _warm_up(row, checkpoint, threads)
    except BenchError as error:
        return result | {"reason": str(error)}
    done = run(command, peer_variables(threads), log, LIMIT_S, REPOSITORY)
    result |= {"command": shlex.join(command), **_figures(done)}
    if done.code != 0:
        return result | {"reason": done.reason}
    return result | {"told": _last_json(done.output) if row.environment else _our_versions(folder)}


def _command(row: Row, checkpoint: Path, folder: Path, threads: int, sequences: int) -> list[str]:
    group = str(GROUP_SIZES[checkpoint.name[-1]])
    if row.environment is None:
        quantkit = str(Path(sys.executable).parent / "quantkit")
        groups = () if row.kind == "int8" else ("--group-size", group)
        return [
            *(quantkit, "convert", str(checkpoint), *row.options, *groups, "--out", str(folder)),
            *("--calibration-text", str(calibration_text()), "--calibration-sequences", str(sequences)),
            *("--calibration-length", str(LENGTH)),
        ]
    tokens = said_by("bench.calibration", str(checkpoint), str(sequences), str(LENGTH))
    return [
        *(str(python_of(row.environment)), str(REPOSITORY / "bench" / "peers" / f"{row.worker}.py")),
        *("--model", str(checkpoint), "--out", str(folder), "--bits", str(row.bits), "--group-size", group),
        *("--calibration", tokens, "--threads", str(threads), *(["--asym"] if row.asym else [])),
    ]


def _warm_up(row: Row, checkpoint: Path, threads: int) -> None:
    """Run the worker once on little text, so that what it compiles on first use is not measured."""
    assert row.environment is not None
    stamp = python_of(row.environment).parent.parent / f".warm-{row.worker}"
    if stamp.is_file():
        return
    folder = work_folder() / "artifacts" / "warm-up"
    command = _command(row, checkpoint, folder, threads, sequences=4)
    done = run(command, peer_variables(threads), folder.with_suffix(".log"), LIMIT_S, REPOSITORY)
    shutil.rmtree(folder, ignore_errors=True)
    if done.code == 0:
        stamp.touch()


def _judge(model: str, folder: Path, threads: int) -> dict[str, Any]:
    command = [
        *(sys.executable, "-m", "bench.judge", "--model", said_by("bench.models", model), "--artifact", str(folder)),
        *("--windows", str(WINDOWS), "--threads", str(threads)),
    ]
    log = folder.with_name(folder.name + ".judge.log")
    done = run(command, peer_variables(threads), log, JUDGE_LIMIT_S, REPOSITORY)
    return _last_json(done.output) if done.code == 0 else {"reason": f"{JUDGE_FAILED}: {done.reason}"}


def _figures(done: Run) -> dict[str, float]:
    return {"cpu_s": round(done.cpu_s, 1), "wall_s": round(done.wall_s, 1), "peak_gb": round(done.peak_gb, 3)}


def _last_json(output: str) -> dict[str, Any]:
    lines = [line for line in output.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return found


def _our_versions(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / "quantkit.json").read_text(encoding="utf-8"))
    return {"versions": manifest["versions"]}


def said_by(module: str, *arguments: str) -> str:
    """Last line that a module of the benchmark prints. A process of its own: this one stays small, since a child
    starts with the resident size of its parent in the system's accounts."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    if done.returncode != 0:
        raise BenchError(f"{module}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout.strip().splitlines()[-1]


def _machine() -> str:
    names = [line.split(":", 1)[1].strip() for line in _processor_lines() if line.startswith("model name")]
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return f"{names[0] if names else platform.machine()}, {len(names)} cores, {int(memory.split()[1]) / 2**20:.0f} GiB"


def _processor_lines() -> list[str]:
    return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()


def _in_short(result: dict[str, Any]) -> str:
    if "reason" in result:
        return f"does not run: {result['reason']}"
    return (
        f"KLD {result['kld']:.5f} ± {result['kld_se']:.5f}, perplexity {result['perplexity']:.3f}, "
        f"CPU {result['cpu_s']:.0f} s, peak {result['peak_gb']:.2f} GB"
    )


if __name__ == "__main__":
    raise SystemExit(main())
