"""A real browser for tests of pages: Chromium without a window, spoken to by the DevTools protocol over two pipes."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
PATIENCE = 30.0  # seconds for one answer


class Browser:
    """One tab: what it asked the network for, what it complained of, and what it is told to do."""

    def __init__(self, to: int, of: int) -> None:
        self._to, self._of, self._rest, self._number, self._session = to, of, b"", 0, ""
        self.requests: list[str] = []
        self._urls: dict[str, str] = {}
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            try:
                piece = os.read(self._of, 1 << 16)
            except BlockingIOError:
                assert time.monotonic() < end, "the browser does not answer"
                time.sleep(0.005)
                continue
            assert piece, "the browser ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self._urls[params["requestId"]] = params["request"]["url"]
            self.requests.append(params["request"]["url"])
        if event == "Network.loadingFailed" and params.get("blockedReason") == "csp":
            self.requests.remove(self._urls[params["requestId"]])  # it was never sent
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        if event == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        if event == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(params["args"])[:500])
        if event == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {params['message']}")

    def open(self, path: Path) -> None:
        """Show a file, and wait until it is loaded."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")


@contextmanager
def browser() -> Iterator[Browser]:
    """A fresh browser with a profile of its own, which is gone afterwards."""
    assert FOUND is not None
    ends = [*os.pipe(), *os.pipe()]
    # Numbers that do not meet 3 and 4, which the browser reads and writes.
    commands, to, of, events = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends)
    for end in ends:
        os.close(end)
    os.set_blocking(of, False)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = [
            "--headless=new",
            "--remote-debugging-pipe",
            "--disable-gpu",
            "--no-first-run",
            "--disable-extensions",
        ]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"]
        options += ["--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []
        pipes = f'exec "$@" 3<&{commands} 4>&{events}'
        child = subprocess.Popen(
            ["bash", "-c", pipes, "browser", FOUND, *options, "about:blank"],
            pass_fds=(commands, events),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(events)
        try:
            opened = Browser(to, of)
            yield opened
            with suppress(AssertionError, OSError):
                opened.call("Browser.close")
        finally:
            os.close(to)
            os.close(of)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
