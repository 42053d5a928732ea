import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from quantkit.system import forking

WORK = """
import json, os, sys, time

def main():
    print("on the log")
    facts = {"arguments": sys.argv[1:-1], "folder": os.getcwd(), "asked": os.environ.get("ASKED")}
    facts["imported"] = "wave" in sys.modules
    with os.fdopen(int(sys.argv[-1]), "w") as events:
        events.write(json.dumps(facts))
    while "wait" in sys.argv:
        time.sleep(0.1)
    os._exit(7)
"""
OWNER = """
import os, sys, time
from quantkit.system import forking

forking.IMPORTED = ()
with open("log", "wb") as log:
    made = forking.fork("work", ["wait"], os.pipe()[1], log.fileno(), dict(os.environ))
print(made.pid, flush=True)
time.sleep(100)
"""


@pytest.fixture(autouse=True)
def starts_quickly(monkeypatch):
    monkeypatch.setattr(forking, "IMPORTED", ("wave",))


@pytest.fixture(scope="module")
def variables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    (folder / "work.py").write_text(WORK)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{Path(forking.__file__).parents[2]}"}


@pytest.fixture
def fork(variables, tmp_path):
    """fork(*arguments): the process, and what it told of itself; its log is `log` in the folder of the test."""

    def start(*arguments, **more):
        read, write = os.pipe()
        with (tmp_path / "log").open("wb") as log:
            made = forking.fork("work", list(arguments), write, log.fileno(), {**variables, **more})
        os.close(write)
        with os.fdopen(read) as events:
            return made, json.loads(events.read() or "{}")

    return start


def test_it_does_what_a_new_interpreter_would(fork, here):
    made, told = fork("one", "two", ASKED="variable")
    assert made.wait(20) == 7
    assert told == {"arguments": ["one", "two"], "folder": str(here), "asked": "variable", "imported": True}
    assert (here / "log").read_text() == "on the log\n"
    made, told = fork()
    assert made.wait(20) == 7
    assert told["asked"] is None  # the variables of one do not stay


def test_one_at_a_time_and_ended_by_signals(fork):
    made, _ = fork("wait")
    assert made.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        made.wait(0.1)
    assert fork()[0] is None  # the server is busy
    made.terminate()
    assert made.wait(20) == -signal.SIGTERM
    made.terminate()  # of what has ended: nothing


def test_a_server_that_has_died_or_has_other_settings_of_libraries_is_replaced(fork):
    made, _ = fork()
    made.wait()
    server = forking._server
    server._process.kill()
    server._process.wait()
    made, _ = fork()
    assert made.wait(20) == 7
    before = forking._server
    assert before is not server
    made, _ = fork(MKL_ENABLE_INSTRUCTIONS="AVX2")
    assert forking._server is not before
    made.wait()


def test_an_interrupted_request_leaves_no_answer_behind(fork):
    class Interrupted(socket.socket):
        def recv(self, *_):
            raise KeyboardInterrupt

    made, _ = fork()
    made.wait()
    server = forking._server
    server._socket = Interrupted(fileno=server._socket.detach())
    with pytest.raises(KeyboardInterrupt):
        fork()
    made, told = fork("again")
    assert made.wait(20) == 7
    assert told["arguments"] == ["again"]


def test_all_end_with_the_owner(variables, here):
    with subprocess.Popen([sys.executable, "-c", OWNER], env=variables, stdout=subprocess.PIPE, text=True) as owner:
        forked = psutil.Process(int(owner.stdout.readline()))
        server = psutil.Process(forked.ppid())
        server.send_signal(signal.SIGINT)  # as a terminal does to all
        time.sleep(0.2)
        assert forked.is_running()
        assert server.is_running()
        owner.kill()
    _, alive = psutil.wait_procs([forked, server], timeout=10)
    assert not alive
