"""Mutations: small errors made in the code on purpose, each of which a test of `make test` should notice.

    python -m bench.mutants --record                    # once: which tests call which function
    python -m bench.mutants --per-room 20 --jobs 2      # draw mutations, run those tests, print the kill rate per room

A mutation changes one comparison, operator, constant or condition, or drops one call, in a function that a test calls
in its own process. They are made from the syntax tree, so no text has to be kept up to date. A mutation is killed when
a test fails that passes without it; the tests tried are those that call the function, its own room's and the quickest
first, up to LIMIT seconds. Some survivors are equivalent to the code as it was.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.folders import REPOSITORY, BenchError, work_folder

CALLS = "calls.json"
USAGE_ERROR = 4  # pytest's exit code for tests that it does not find
LIMIT = 5.0  # seconds of tests, as they take without a mutation
PATIENCE = 5  # how much longer a mutated run may take
LEFT_OUT = (".venv", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__", "demo-output", "results")
# Imported before a run is forked, so that each begins at once. Nothing of quantkit: that is what changes.
PRELOADED = (
    *("torch", "transformers", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"),
    *("scipy.stats", "gguf", "bitsandbytes", "ctranslate2.converters", "llama_cpp", "pytest", "typer", "pydantic"),
)
SWAPS: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.MatMult: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutation:
    """One error: lines `first` to `last` of `file` (a path below quantkit/) become `text`; `tests` may notice it."""

    file: str
    first: int
    last: int
    text: str
    what: str
    tests: tuple[str, ...]
    seconds: float

    @property
    def room(self) -> str:
        """The top folder; files at the top are one room."""
        return self.file.split("/")[0] if "/" in self.file else "files at the top"

    @contextmanager
    def applied(self, tree: Path) -> Iterator[None]:
        """Make the error in a copy of the tree, and take it back."""
        path = tree / "quantkit" / self.file
        right = path.read_text(encoding="utf-8")
        lines = right.splitlines(keepends=True)
        _write(path, "".join([*lines[: self.first - 1], self.text + "\n", *lines[self.last :]]))
        try:
            yield
        finally:
            _write(path, right)


def _write(path: Path, text: str) -> None:
    """Write a module; bytecode of the same second and length would pass for it."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def mutants_of(function: Function) -> Iterator[tuple[ast.stmt, ast.stmt, str]]:
    """Every statement of a function that can be mutated, the same with one error in it, and what that is.

    Errors that are raised, annotations and docstrings are left alone.
    """
    for statement in ast.walk(function):
        if not isinstance(statement, ast.stmt) or isinstance(
            statement, ast.Raise | ast.Assert | Function | ast.ClassDef
        ):
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield statement, ast.copy_location(ast.Pass(), statement), "a call is dropped"
        for number in range(len(_own_nodes(statement))):
            changed = copy.deepcopy(statement)
            if what := _mutate(_own_nodes(changed)[number]):
                yield statement, changed, what


def _own_nodes(statement: ast.stmt) -> list[ast.expr]:
    """The expressions of a statement, without those of statements inside it and without texts put together."""
    found: list[ast.expr] = []
    todo: list[ast.AST] = [
        child
        for name, value in ast.iter_fields(statement)
        if name != "annotation"
        for child in (value if isinstance(value, list) else [value])
        if isinstance(child, ast.expr)
    ]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.expr):
            found.append(node)
        if not isinstance(node, ast.JoinedStr):
            todo.extend(ast.iter_child_nodes(node))
    return found


def _mutate(node: ast.expr) -> str:
    """Make the one error that an expression can have; say what, or nothing where there is none."""
    if isinstance(node, ast.Compare):
        old: Any = node.ops[0]
        node.ops[0] = new = SWAPS[type(old)]()
        return f"{type(old).__name__} becomes {type(new).__name__}"
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        old = node.op
        node.op = new = SWAPS[type(old)]()
        return f"{type(old).__name__} becomes {type(new).__name__}"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node.operand = ast.UnaryOp(ast.Not(), node.operand)
        return "not is dropped"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        old_value = node.value
        node.value = (not old_value) if isinstance(old_value, bool) else old_value + 1
        return f"{old_value} becomes {node.value}"
    if isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body
        return "the branches of an expression change places"
    return ""


def every_mutation(calls: dict[str, tuple[float, list[str]]]) -> list[Mutation]:
    """All mutations of functions that a recorded test calls."""
    callers: dict[str, list[str]] = defaultdict(list)
    for test, (_, functions) in calls.items():
        for function in functions:
            callers[function].append(test)
    found: list[Mutation] = []
    for path in sorted((REPOSITORY / "quantkit").rglob("*.py")):
        file = path.relative_to(REPOSITORY / "quantkit").as_posix()
        text = path.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, Function):
                continue
            start = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
            tests, seconds = _chosen(callers.get(f"{file}:{start}", []), calls, file)
            for statement, changed, what in mutants_of(function) if tests else ():
                new = _text_of(statement, changed)
                found.append(
                    Mutation(
                        file, statement.lineno, statement.end_lineno or statement.lineno, new,
                        f"{function.name}, line {statement.lineno}: {what}", tests, seconds,
                    )
                )  # fmt: skip
    return found


def _text_of(statement: ast.stmt, changed: ast.stmt) -> str:
    """The changed statement as source, indented as it was."""
    text = ast.unparse(ast.fix_missing_locations(changed))
    return "\n".join(" " * statement.col_offset + line for line in text.splitlines())


def _chosen(tests: list[str], calls: dict[str, tuple[float, list[str]]], file: str) -> tuple[tuple[str, ...], float]:
    """The tests to run, and the seconds that they take: those of the room first, then the quickest, up to LIMIT."""
    room = f"tests/{file.split('/')[0]}/"
    chosen: list[str] = []
    seconds = 0.0
    for test in sorted(tests, key=lambda test: (not test.startswith(room), calls[test][0])):
        if chosen and seconds + calls[test][0] > LIMIT:
            break
        chosen.append(test)
        seconds += calls[test][0]
    return tuple(chosen), seconds


def killed(mutation: Mutation) -> bool:
    """Whether a test fails with the mutation and passes without it, in this process's copy of the tree."""
    patience = PATIENCE * (mutation.seconds + 10)
    failures = TREE / ".pytest_cache" / "v" / "cache" / "lastfailed"
    failures.unlink(missing_ok=True)
    with mutation.applied(TREE):
        if run_tests(TREE, mutation.tests, patience) == 0:
            return False
    failed = tuple(json.loads(failures.read_text(encoding="utf-8"))) if failures.exists() else mutation.tests
    code = run_tests(TREE, failed, patience)
    if code == USAGE_ERROR:
        raise BenchError(f"a recorded test is gone, one of {', '.join(failed)}: record again (--record)")
    return code == 0


def run_tests(tree: Path, arguments: tuple[str, ...], seconds: float) -> int:
    """Run pytest in a copy of the tree, in a fork of this process; its exit code, or the signal that ended it.

    It stops at the first failure, and by SIGALRM when its time is over.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.alarm(math.ceil(seconds))
        os.environ["PYTHONPATH"] = str(tree)
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        for name in [name for name in sys.modules if name.split(".")[0] in ("quantkit", "bench")]:
            del sys.modules[name]  # they come from the copy
        sys.modules["__main__"] = ModuleType("__main__")  # which processes of multiprocessing would import again
        log = os.open(tree / "tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 3
        try:
            import pytest

            code = int(pytest.main(["-x", "--tb=no", "-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]))
        except BaseException:  # noqa: BLE001 - this process must not go on
            traceback.print_exc()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what its tests have started
    return os.waitstatus_to_exitcode(status)


TREE = Path()  # the copy that this process changes


def prepare(place: Path) -> None:
    """Copy the tree for this process, and import what takes long and does not change."""
    global TREE
    TREE = copied(place / str(os.getpid()))
    for module in PRELOADED:
        with suppress(ImportError):
            import_module(module)


def copied(place: Path) -> Path:
    """A copy of the repository in `place`, with the shared data alongside it."""
    tree = place / "tree"
    shutil.copytree(REPOSITORY, tree, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    shared = REPOSITORY.parent / "shared"
    if shared.is_dir():
        (place / "shared").symlink_to(shared)
    return tree


def record(target: Path) -> None:
    """Run the quick lane and write down who calls what."""
    target.parent.mkdir(parents=True, exist_ok=True)
    command = ["-p", "bench.calls", "--calls-to", str(target), "-n", "2", "--dist", "worksteal", "-m", "not slow"]
    subprocess.run([sys.executable, "-m", "pytest", *command], cwd=REPOSITORY, check=True)
    calls = {}
    for part in target.parent.glob(f"{target.stem}.*.json"):
        calls |= json.loads(part.read_text(encoding="utf-8"))
        part.unlink()
    target.write_text(json.dumps(calls), encoding="utf-8")
    print(f"{len(calls)} tests recorded in {target}")


def main() -> int:
    """Draw, run, print; the exit code is 1 where a room has no test that kills anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="record which tests call which function")
    parser.add_argument("--rooms", help="such as numerics,formats; default: all")
    parser.add_argument("--per-room", type=int, default=20, help="mutations drawn per room (default: 20)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="mutations tried at once (default: 2)")
    asked = parser.parse_args()
    target = work_folder() / CALLS
    if asked.record or not target.is_file():
        record(target)
    drawn = draw(json.loads(target.read_text(encoding="utf-8")), asked.rooms, asked.per_room, asked.seed)
    alive: dict[str, list[Mutation]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    place = Path(tempfile.mkdtemp(prefix="quantkit-mutants-"))
    try:
        with ProcessPoolExecutor(asked.jobs, get_context("fork"), prepare, (place,)) as pool:
            for mutation, dead in zip(drawn, pool.map(killed, drawn), strict=True):
                counts[mutation.room] += 1
                if not dead:
                    alive[mutation.room].append(mutation)
                print(f"{'killed' if dead else 'SURVIVED'}  {mutation.file} {mutation.what}", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print("\n| room | mutations | killed |\n|---|---:|---:|")
    for room, count in counts.items():
        print(f"| {room} | {count} | {1 - len(alive[room]) / count:.0%} |")
    total = sum(counts.values())
    print(f"| all | {total} | {1 - sum(map(len, alive.values())) / total:.0%} |")
    return int(any(len(alive[room]) == count for room, count in counts.items()))


def draw(calls: dict[str, tuple[float, list[str]]], rooms: str | None, per_room: int, seed: int) -> list[Mutation]:
    """Mutations of each room, the same ones for the same code, record and seed; raises BenchError for a wrong room."""
    by_room: dict[str, list[Mutation]] = defaultdict(list)
    for mutation in every_mutation(calls):
        by_room[mutation.room].append(mutation)
    wanted = rooms.split(",") if rooms else sorted(by_room)
    if unknown := [room for room in wanted if room not in by_room]:
        raise BenchError(f"no mutations in {', '.join(unknown)}; there are some in {', '.join(sorted(by_room))}")
    drawn: list[Mutation] = []
    for room in wanted:
        chance = random.Random(f"{seed} {room}")
        drawn += chance.sample(by_room[room], min(per_room, len(by_room[room])))
    return drawn


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"error: {error}")
