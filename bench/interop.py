"""Load quantkit's artifacts in the engines that users run, and compare log-probabilities with quantkit's own reader.

For each artifact and engine: the largest and the mean difference of log-probabilities on one prompt, over the 20 most
likely tokens of each position, next to what bfloat16 alone does to the source model. Exit code 1 where an engine does
not load what it should, or computes something else.

python -m bench.interop [--threads 1] [--engines gptqmodel,transformers,vllm] [--cases f-ct-w8a8]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.environments import peer_variables, python_of
from bench.folders import REPOSITORY, RESULTS, BenchError, calibration_text, work_folder
from bench.measure import run
from bench.run_peers import said_by

PROMPT = "The river rises in the hills north of the town, and for nine months of the year it carries"
SEQUENCES, LENGTH = "32", "512"
LIMIT_S = 1800
TOP = 20
MOST_MEAN = 3.0  # times bfloat16's own mean difference


@dataclass(frozen=True)
class Case:
    """One artifact: source model, options, whether it is calibrated; which engine refuses it by design, and why.

    Where inputs are rounded, the last bits of bfloat16 decide which way: `noise` is then that of the artifact itself.
    """

    name: str
    model: str
    options: tuple[str, ...]
    refused: tuple[tuple[str, str], ...] = ()
    calibrated: bool = True
    engines: tuple[str, ...] = ("gptqmodel", "vllm")
    rounds_inputs: bool = False


def _grouped(name: str, model: str, options: str, *refused: tuple[str, str]) -> Case:
    """Grouped codes in the model's group size; round to nearest needs no text."""
    words = ("--method", *options.split(), "--group-size", {"f": "64", "k": "128"}[model])
    engines = ("transformers" if "compressed-tensors" in options else "gptqmodel", "vllm")
    return Case(f"{model}-{name}", model, words, refused, not options.startswith("rtn"), engines)


def _mlx(name: str, options: str) -> Case:
    words = ("--method", *options.split(), "--group-size", "64", "--format", "mlx")
    return Case(f"f-mlx-{name}", "f", words, (), not options.startswith("rtn"), ("mlx",))


ASYMMETRIC = ("vllm", "refuses asymmetric GPTQ by design")
NO_ZEROS = ("transformers", "does not load packed zero points")
EIGHT = ("vllm", "its CPU build has no kernel for 8-bit weights")
CARDS = ("vllm", "computes it on NVIDIA cards only")
PLAIN = ("transformers", "vllm")
CASES = (
    _grouped("gptq-4-sym", "f", "gptq"),
    _grouped("gptq-4-asym", "f", "gptq --no-sym", ASYMMETRIC),
    _grouped("gptq-4-desc-act", "f", "gptq --desc-act", ("vllm", "refuses desc_act by design")),
    _grouped("gptq-8-sym", "f", "rtn --bits 8", EIGHT),
    _grouped("awq-4", "f", "awq"),
    _grouped("ct-w4a16", "f", "gptq --format compressed-tensors"),
    _grouped("ct-w4a16-asym", "f", "gptq --no-sym --format compressed-tensors", NO_ZEROS),
    _grouped("ct-w8a16", "f", "rtn --bits 8 --format compressed-tensors", EIGHT),
    _grouped("ct-w8a16-asym", "f", "rtn --bits 8 --no-sym --format compressed-tensors", NO_ZEROS, EIGHT),
    Case("f-ct-w8a8", "f", ("--method", "int8"), engines=PLAIN, rounds_inputs=True),
    Case("f-ct-fp8", "f", ("--method", "fp8"), calibrated=False, engines=PLAIN, rounds_inputs=True),
    Case("f-ct-nvfp4", "f", ("--method", "rtn", "--bits", "nvfp4"), (CARDS,), calibrated=False, engines=PLAIN),
    Case("f-ct-mxfp4", "f", ("--method", "rtn", "--bits", "mxfp4"), (CARDS,), calibrated=False, engines=PLAIN),
    Case("f-nf4", "f", ("--method", "nf4"), calibrated=False, engines=PLAIN),
    _mlx("gptq", "gptq"),
    _mlx("awq-head", "awq --head-bits 4"),
    _mlx("rtn-6", "rtn --bits 6"),
    _grouped("gptq-4-sym", "k", "gptq"),
    _grouped("awq-4", "k", "awq"),
)


@dataclass(frozen=True)
class Engine:
    """A script of bench/engines, the environment whose python runs it (None: quantkit's), its process variables."""

    name: str
    script: str
    environment: str | None
    variables: tuple[tuple[str, str], ...] = ()


# vLLM rounds activations to int8 by default where the processor can; here the weights are compared.
VLLM_VARIABLES = (
    ("VLLM_CPU_INT4_W4A8", "0"),
    ("VLLM_CPU_KVCACHE_SPACE", "1"),
    ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
)
ENGINES = {
    "gptqmodel": Engine("transformers + gptqmodel", "transformers_model", "gptqmodel"),
    "transformers": Engine("transformers", "transformers_model", None),
    "mlx": Engine("mlx-lm (CPU)", "mlx_model", None),
    "vllm": Engine("vLLM (CPU)", "vllm_cpu", "vllm", VLLM_VARIABLES),
}
REFERENCE = Engine("reference", "reference", None)


@dataclass
class Outcome:
    """What came of one artifact in one engine."""

    artifact: str
    engine: str
    state: str  # agrees, differs, fails, refused by design
    largest: float | None = None
    mean: float | None = None
    remark: str = ""


def main() -> int:
    """Convert, load, compare, print; 1 where something that should work does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engines", default=",".join(ENGINES), help="default: %(default)s")
    parser.add_argument("--cases", default=",".join(case.name for case in CASES), help="default: %(default)s")
    asked = parser.parse_args()
    folder = work_folder() / "interop"
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    try:
        noise = {model: _noise(model, folder, asked.threads) for model in sorted({case.model for case in CASES})}
        for case in CASES:
            if case.name in asked.cases.split(","):
                outcomes += _judge(case, asked.engines.split(","), noise[case.model], folder, asked.threads)
    except (BenchError, KeyError) as error:
        print(error, file=sys.stderr)
        return 1
    _tell(outcomes, noise)
    return 1 if any(outcome.state in ("fails", "differs") for outcome in outcomes) else 0


def _noise(model: str, folder: Path, threads: int) -> tuple[float, float]:
    """Largest and mean difference that bfloat16 makes on the source model."""
    checkpoint = Path(said_by("bench.models", model))
    prompt = _prompt(checkpoint, folder)
    exact = _run(REFERENCE, checkpoint, prompt, folder / f"{model}-float32.npy", threads, "float32")
    rounded = _run(REFERENCE, checkpoint, prompt, folder / f"{model}-bfloat16.npy", threads)
    return difference(exact, rounded)


def _prompt(checkpoint: Path, folder: Path) -> Path:
    from quantkit.models.config import load_tokenizer

    path = folder / f"prompt-{checkpoint.name}.json"
    path.write_text(json.dumps(load_tokenizer(checkpoint)(PROMPT)["input_ids"]), encoding="utf-8")
    return path


def _judge(case: Case, engines: list[str], noise: tuple[float, float], folder: Path, threads: int) -> list[Outcome]:
    checkpoint = Path(said_by("bench.models", case.model))
    prompt = _prompt(checkpoint, folder)
    try:
        artifact = _convert(case, checkpoint, folder, threads)
        own = _run(REFERENCE, artifact, prompt, folder / f"{case.name}-reference.npy", threads)
        if case.rounds_inputs:
            exact = _run(REFERENCE, artifact, prompt, folder / f"{case.name}-float32.npy", threads, "float32")
            noise = difference(exact, own)
    except BenchError as error:
        print(f"{case.name}, quantkit: {error}", flush=True)
        return [Outcome(case.name, "quantkit", "fails", remark=str(error))]
    outcomes = []
    for key in (key for key in case.engines if key in engines):
        engine = ENGINES[key]
        outcome = Outcome(case.name, engine.name, "agrees")
        suffix = "json" if key == "vllm" else "npy"
        try:
            theirs = _run(engine, artifact, prompt, folder / f"{case.name}-{key}.{suffix}", threads)
            outcome.largest, outcome.mean = difference(own, theirs)
            if not outcome.mean <= MOST_MEAN * noise[1]:
                outcome.state = "differs"
        except BenchError as error:
            outcome.state, outcome.remark = "fails", str(error)
        by_design = dict(case.refused).get(key)
        if by_design:
            refused = outcome.state == "fails"
            outcome.remark = by_design if refused else f"expected: {by_design}; it loads"
            outcome.state = "refused by design" if refused else outcome.state
        print(f"{case.name}, {engine.name}: {outcome.state} {outcome.remark}", flush=True)
        outcomes.append(outcome)
    return outcomes


def _convert(case: Case, checkpoint: Path, folder: Path, threads: int) -> Path:
    artifact = folder / case.name
    shutil.rmtree(artifact, ignore_errors=True)
    command = [
        *(str(Path(sys.executable).parent / "quantkit"), "convert", str(checkpoint), *case.options),
        *(("--calibration-text", str(calibration_text())) if case.calibrated else ()),
        *(("--calibration-sequences", SEQUENCES, "--calibration-length", LENGTH) if case.calibrated else ()),
        *("--out", str(artifact)),
    ]
    done = run(command, peer_variables(threads), folder / f"{case.name}-convert.log", LIMIT_S, REPOSITORY)
    if done.code != 0:
        raise BenchError(f"cannot be converted: {done.reason}")
    return artifact


def _run(engine: Engine, model: Path, prompt: Path, out: Path, threads: int, dtype: str = "bfloat16") -> Any:
    """The log-probabilities that the engine writes: an array, or a list of maps."""
    import numpy as np

    python = str(python_of(engine.environment)) if engine.environment else sys.executable
    command = [
        *(python, str(REPOSITORY / "bench" / "engines" / f"{engine.script}.py"), "--model", str(model)),
        *("--prompt", str(prompt), "--out", str(out), "--dtype", dtype, "--threads", str(threads)),
    ]
    out.unlink(missing_ok=True)
    variables = {**peer_variables(threads), **dict(engine.variables)}
    done = run(command, variables, out.with_suffix(".log"), LIMIT_S, REPOSITORY)
    if done.code != 0 or not out.is_file():
        raise BenchError(done.reason)
    return np.load(out) if out.suffix == ".npy" else json.loads(out.read_text(encoding="utf-8"))


def difference(ours: Any, theirs: Any) -> tuple[float, float]:
    """Largest and mean absolute difference of log-probabilities; `ours` is (T, V), `theirs` may be a list of maps.

    Compared are our 20 most likely tokens of each position, or the tokens that an engine told.
    """
    found: list[float] = []
    for position, row in enumerate(ours):
        if isinstance(theirs, list):
            told = {int(token): value for token, value in theirs[position].items()}
        else:
            told = {int(token): float(theirs[position][token]) for token in row.argsort()[-TOP:]}
        found += [abs(float(row[token]) - value) for token, value in told.items()]
    return max(found), sum(found) / len(found)


def _tell(outcomes: list[Outcome], noise: dict[str, tuple[float, float]]) -> None:
    table = Table(title="Difference of log-probabilities to quantkit's reference, bfloat16")
    for column in ("artifact", "engine", "largest", "mean", "state"):
        table.add_column(column, justify="right" if column in ("largest", "mean") else "left")
    for model, (largest, mean) in noise.items():
        table.add_row(f"{model}, not quantized", "bfloat16 against float32", f"{largest:.4f}", f"{mean:.4f}", "noise")
    for outcome in outcomes:
        figures = [f"{value:.4f}" if value is not None else "" for value in (outcome.largest, outcome.mean)]
        table.add_row(outcome.artifact, outcome.engine, *figures, f"{outcome.state} {outcome.remark}".strip())
    Console(width=160).print(table)
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {
        "noise": {model: {"largest": largest, "mean": mean} for model, (largest, mean) in noise.items()},
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    (RESULTS / "interop.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
