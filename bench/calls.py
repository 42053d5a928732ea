"""A pytest plugin that records which functions of quantkit each test calls, and how long the test takes.

    pytest -p bench.calls --calls-to calls.json

A test also counts what its fixtures called when they were made, whichever test made them. Calls in other processes are
not seen.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from bench.folders import REPOSITORY

PACKAGE = str(REPOSITORY / "quantkit") + "/"


class Recorder:
    """Collects code objects while tests run; `calls` maps a test to its functions and seconds."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.calls: dict[str, tuple[float, list[str]]] = {}
        self._seen: set[CodeType] = set()
        self._by_fixture: dict[int, set[CodeType]] = {}

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._seen.add(frame.f_code)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """Set apart what a fixture calls."""
        before, self._seen = self._seen, set()
        try:
            return (yield)
        finally:
            self._by_fixture[id(fixturedef)] = self._seen
            self._seen = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Record one test with its fixtures."""
        self._seen, start = set(), time.perf_counter()
        sys.setprofile(self._profile)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            made = (one for defs in item._fixtureinfo.name2fixturedefs.values() for one in defs)
            codes = self._seen.union(*(self._by_fixture.get(id(one), set()) for one in made))
            called = [
                f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno}"
                for code in codes
                if code.co_filename.startswith(PACKAGE)
            ]
            self.calls[item.nodeid] = (round(time.perf_counter() - start, 2), sorted(called))

    def pytest_sessionfinish(self) -> None:
        """Write what was recorded."""
        self.target.write_text(json.dumps(self.calls), encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write."""
    parser.addoption("--calls-to", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Record in every process that runs tests; workers of xdist write files of their own."""
    target: Path = config.getoption("--calls-to")
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder(target.with_suffix(f".{worker or 'main'}.json")))
