"""What became of a case, by fixed rules."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from bench.fuzz.children import MEMORY, WORKER_TRACE, Ended

REFUSED, DONE, UNJUDGED, SAME = "refused", "done, right", "done, not checked", "unchanged"
BAD = ("TRACEBACK", "HANG", "ABORT", "MEMORY", "MULTILINE", "LEFTOVER", "TAKEN", "FAULT")
COLUMNS = (REFUSED, DONE, UNJUDGED, *BAD)
LONGEST = 2000
PASSING = (".new", ".partial", ".replaced", ".tmp")


@dataclass(frozen=True)
class Outcome:
    """One of COLUMNS (or SAME), with the reason."""

    name: str
    reason: str

    @property
    def bad(self) -> bool:
        """Whether it is a defect."""
        return self.name in BAD


def outcome_of(ended: Ended, folder: Path) -> Outcome:
    """The outcome of a child that worked in `folder`."""
    result = ended.result
    if result.get("same"):
        return Outcome(SAME, "the damage changed no byte")
    if result.get("fault"):
        return Outcome("FAULT", result["fault"].strip())
    ran, judged = "code" in result, "judged" in result
    if not ran:
        return _died(ended, "")
    if result["memory_error"] or ended.peak_bytes > MEMORY:
        return Outcome("MEMORY", f"{ended.peak_bytes / 1e9:.1f} GB; {result['trace'] or result['err']}".strip())
    trace = folder / WORKER_TRACE
    if result["trace"] or trace.is_file():
        return Outcome("TRACEBACK", (result["trace"] or "in a worker: " + trace.read_text()).strip())
    err = result["err"].strip()
    if "Traceback (most recent call last)" in err:
        return Outcome("TRACEBACK", err)
    silent = result["code"] == 1 and not err and bool(result["out"].strip())  # a result that is bad news
    wrong = _unlike_a_refusal(result["code"], err) if result["code"] and not silent else ""
    if wrong:
        return Outcome("MULTILINE", f"{wrong}: {err[:3000]}")
    if silent:
        return Outcome(UNJUDGED, "")
    if left := _left(folder, result):
        return Outcome("LEFTOVER", f"{', '.join(left)[:500]} after: {err or 'done'}")
    if result["code"]:
        return Outcome(REFUSED, err)
    if not judged:
        died = _died(ended, " of the judge")
        return Outcome("TAKEN", died.reason) if result.get("judging") else Outcome(UNJUDGED, "")
    if result["judged"] is None:
        return Outcome(UNJUDGED, "")
    return Outcome("TAKEN", result["judged"]) if result["judged"] else Outcome(DONE, "")


def _died(ended: Ended, where: str) -> Outcome:
    code = os.waitstatus_to_exitcode(ended.status)
    if ended.timed_out or code == -signal.SIGXCPU:
        return Outcome("HANG", f"did not end{where}")
    return Outcome("ABORT", f"{signal.Signals(-code).name if code < 0 else f'code {code}'}{where}")


def _unlike_a_refusal(code: int, err: str) -> str:
    """What is wrong with the words of a refusal; empty where nothing is."""
    if code == 2 and "Usage:" in err:
        text = err.partition("Error")[2]
        return "too long" if len(text) > 2 * LONGEST else ""
    if code == 2 and err.lower().startswith("error:"):
        code = 1
    lines = err.splitlines()
    if len(lines) > 1 and "Run the same command to continue" in lines[0]:  # that work is kept is told before
        err = "\n".join(lines[1:])
    if code != 1:
        return f"code {code}"
    if not err.lower().startswith("error: "):
        return "not one error"
    if "\n" in err:
        return "several lines"
    if not err.isprintable():
        return "not printable"
    if len(err) > LONGEST:
        return f"{len(err)} characters"
    return "" if len(err) > 30 else "says nothing"


def _left(folder: Path, result: dict[str, object]) -> list[str]:
    """What should not lie there any more."""
    before = set(result["before"])  # type: ignore[call-overload]
    here = folder / "here"
    found = {path.relative_to(here).as_posix() for path in here.rglob("*")} - before
    passing = {name for name in found if any(part.endswith(PASSING) for part in name.split("/"))}
    temporary = [f"TMPDIR/{path.name}" for path in (folder / "tmp").iterdir()]
    kept = "Run the same command to continue" in str(result["err"])
    wrong = (set() if kept else found) if result["code"] else passing
    return sorted(temporary) + sorted(wrong)
