"""quantkit serve: the engine's own server answers, is measured, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil
import pytest
from tiny_models import CALIBRATION, save_tiny
from typer.testing import CliRunner

from quantkit import convert
from quantkit.artifact import Artifact
from quantkit.cli.app import app
from quantkit.errors import DependencyError, EngineError, OutputError, RecipeError, UnsupportedError
from quantkit.recipe import LoadTestSpec
from quantkit.serving.client import OK, Endpoint
from quantkit.serving.launch import plan, serving
from quantkit.serving.load_test import load
from quantkit.serving.servers import SERVERS, ServerAddress


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def gguf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return convert(str(tiny), "gguf", "Q8_0", out=tmp_path_factory.mktemp("out") / "gguf")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def quantkit_serve(gguf: Artifact, stderr: int = subprocess.DEVNULL) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`quantkit serve` in a process of its own, which has told its URL."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "quantkit.cli",
        "serve",
        str(gguf.folder),
        "--port",
        str(port),
        "--threads",
        "1",
    ]
    # By default a child of a test would ignore Ctrl-C where the tests themselves run in the background.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"http://127.0.0.1:{port}/v1 serves tiny\n"
        yield process, port
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture
def started(gguf: Artifact) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """One that the test may end."""
    with quantkit_serve(gguf) as process_and_port:
        yield process_and_port


@pytest.fixture(scope="module")
def port(gguf: Artifact) -> Iterator[int]:
    """Where one answers that all tests share."""
    with quantkit_serve(gguf) as (_, number):
        yield number


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_no_process_is_left(started: tuple[subprocess.Popen[str], int], kind: signal.Signals, code: int) -> None:
    process, port = started
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("llama_cpp.server" in child.cmdline() for child in family)
    process.send_signal(kind)
    assert process.wait(30) == code
    assert [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    with socket.socket() as probe, pytest.raises(ConnectionError):
        probe.connect(("127.0.0.1", port))


def test_no_process_is_left_after_a_kill_that_nobody_can_catch(started: tuple[subprocess.Popen[str], int]) -> None:
    process, _ = started
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _, left = psutil.wait_procs(family, timeout=20)
    assert left == []


def test_a_server_that_is_killed_is_told_with_its_signal(gguf: Artifact) -> None:
    with quantkit_serve(gguf, stderr=subprocess.PIPE) as (process, _):
        [server] = [c for c in psutil.Process(process.pid).children() if "llama_cpp.server" in c.cmdline()]
        server.kill()
        _, err = process.communicate(timeout=30)
    last = err.strip().splitlines()[-1]
    assert process.returncode == 1
    assert last.startswith("error: EngineError: llama-cpp-python's server was ended by SIGKILL")


def test_no_process_is_left_while_an_answer_is_on_its_way(started: tuple[subprocess.Popen[str], int]) -> None:
    process, port = started
    family = psutil.Process(process.pid).children(recursive=True)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 200, "stream": True}
    with httpx2.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    assert [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_it_is_measured_over_the_network(port: int, api: str) -> None:
    answers = {}
    for concurrency in (1, 3):
        spec = LoadTestSpec(requests=6, concurrency=concurrency, max_tokens=8, duration=60)
        report = load(Endpoint(f"http://127.0.0.1:{port}/v1", "tiny", api), spec, ("the first", "the second"))
        assert report.counts == {OK: 6}, report.examples
        answers[concurrency] = report.find("tokens_per_answer")
    one, three = answers[1], answers[3]
    assert one is not None
    assert three is not None
    # No request cuts another one's answer off, as by this server's own default.
    assert one.value == three.value > 0


@pytest.mark.parametrize("client", ["openai", "langchain_openai"])
def test_the_clients_of_the_docs(port: int, client: str) -> None:
    """The page's own lines, on this server and model."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if client in block)
    code = code.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace('model="demo"', 'model="tiny"')
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "LANGSMITH_TRACING": "false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout  # what it printed, at least the end of the line


def test_a_port_that_is_taken_is_refused(gguf: Artifact) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launch = plan(str(gguf.folder), port=taken.getsockname()[1])
        with pytest.raises(OutputError, match="Give another --port"), serving(launch):
            pass


@pytest.mark.parametrize("host", ["no such host", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_refused(gguf: Artifact, host: str) -> None:
    with pytest.raises(OutputError, match="cannot be listened on"), serving(plan(str(gguf.folder), host=host)):
        pass


def test_an_engine_that_is_missing_is_told_with_the_way_to_get_it(gguf: Artifact, tiny: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    for subject, says in (
        (gguf.folder, r"lacks llama_cpp, .*pip install 'quantkit\[serve\]'"),
        (tiny, r"lacks vllm .*environment of its own"),
    ):
        launch = plan(str(subject), python=python, port=free_port())
        with pytest.raises(DependencyError, match=says), serving(launch):
            pass
    with pytest.raises(DependencyError, match="cannot be run"), serving(plan(str(gguf.folder), python="/none")):
        pass


def test_a_server_that_ends_before_it_answers_is_told(gguf: Artifact, tmp_path: Path) -> None:
    venv.create(tmp_path / "broken", with_pip=False)
    site = next((tmp_path / "broken" / "lib").glob("python*/site-packages"))
    for name in SERVERS["llamacpp"].modules:
        (site / name).mkdir()
        (site / name / "__init__.py").touch()
    launch = plan(str(gguf.folder), python=str(tmp_path / "broken" / "bin" / "python"), port=free_port())
    begin = time.monotonic()
    with pytest.raises(EngineError, match="ended with code 1 before it answered"), serving(launch):
        pass
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"port": 0}, RecipeError, "between 1 and 65535"),
        ({"port": 70000}, RecipeError, "between 1 and 65535"),
        ({"n_ctx": 10**6}, RecipeError, "has at most"),
        ({"threads": 0}, RecipeError, "threads: give from 1 to"),
        ({"threads": 10**400}, RecipeError, "threads: give from 1 to"),
        ({"port": 10**400}, RecipeError, "between 1 and 65535"),
        ({"name": "--trust-remote-code"}, RecipeError, "begins with a dash"),
        ({"host": "-x"}, RecipeError, "begins with a dash"),
        ({"name": "a\0b"}, RecipeError, "cannot be printed"),
        ({"python": "a\x1bb"}, RecipeError, "cannot be printed"),
        ({"engine": "vlm"}, RecipeError, "Did you mean 'vllm'"),
        ({"engine": "vllm"}, UnsupportedError, "transformers' formats only"),
    ],
)
def test_what_cannot_work_is_refused(gguf: Artifact, options: dict[str, object], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        plan(str(gguf.folder), **options)  # type: ignore[arg-type]


def test_what_vllm_and_exllama_do_not_load_is_refused(tiny: Path, tmp_path: Path) -> None:
    made = convert(str(tiny), "gptq", 4, out=tmp_path / "asym", calibration=CALIBRATION, sym=False, group_size=32)
    with pytest.raises(UnsupportedError, match="symmetric"):
        plan(str(made.folder), "vllm")
    assert plan(str(made.folder), "tabbyapi").server.name == "tabbyapi"
    plain = convert(str(tiny), "gptq", 4, out=tmp_path / "sym", calibration=CALIBRATION, group_size=32)
    assert plan(str(plain.folder)).server.name == "vllm"
    with pytest.raises(UnsupportedError, match="llama-cpp-python's server cannot serve gptq-4"):
        plan(str(plain.folder), "llamacpp")


@pytest.mark.parametrize("engine", SERVERS)
def test_each_command_is_shown(gguf: Artifact, tiny: Path, engine: str) -> None:
    subject = gguf.folder if engine in ("llamacpp", "llama-server") else tiny
    words = [
        "serve",
        str(subject),
        "--engine",
        engine,
        "--print",
        "--port",
        "8123",
        "--n-ctx",
        "64",
        "--name",
        "my model",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    for part in ("8123", "64", str(subject.resolve()) if engine != "tabbyapi" else subject.name):
        assert part in done.output
    if engine not in ("tgi", "tabbyapi"):
        assert "'my model'" in done.output


def test_one_that_is_only_shown_is_not_started(tiny: Path) -> None:
    done = CliRunner().invoke(app, ["serve", str(tiny), "--engine", "sglang"])
    assert isinstance(done.exception, RecipeError)
    assert "--print" in str(done.exception)


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1/v1"), ("::1", "http://[::1]:1/v1"), ("example", "http://example:1/v1")],
)
def test_the_url_of_an_address(host: str, url: str) -> None:
    assert ServerAddress(host, 1, 1, 1, "python", "name").url == url


def test_the_environment_is_not_changed(gguf: Artifact) -> None:
    before = dict(os.environ)
    plan(str(gguf.folder))
    assert dict(os.environ) == before


def test_vllm_gets_the_asked_threads_and_a_store_that_fits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    variables = plan(str(tiny), "vllm", threads=3).command.variables
    assert variables == {"OMP_NUM_THREADS": "3", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "4"}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert plan(str(tiny), "vllm").command.variables["VLLM_CPU_KVCACHE_SPACE"] == "2"
