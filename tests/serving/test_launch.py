import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx2
import psutil
import pytest
from environments import packages_of, put_empty, python_in
from faulty_server import answering, free_port
from killed import started, until
from tiny_models import succeeds

from quantkit.conversion.convert import convert
from quantkit.errors import DependencyError, EngineError, OutputError, RecipeError, UnsupportedError
from quantkit.records.recipe import LoadTestSpec
from quantkit.serving import servers
from quantkit.serving.client import OK, Endpoint
from quantkit.serving.launch import serving
from quantkit.serving.load_test import run_load_test
from quantkit.serving.servers import SERVERS, plan_server


def serve_by_a_stand_in(port):
    """Let a small server that answers at once stand in for llama-cpp-python's, which takes seconds to start."""

    def planned(*given, **settings):
        start = plan_server(*given, **settings)
        return replace(start, arguments=answering(port), server=replace(start.server, modules=("http",)))

    servers.plan_server = planned


def answers(port):
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False)
    except httpx2.HTTPError:
        return None


def alive(family):
    return [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_process_is_left(kind, code, gguf, tmp_path):
    port = free_port()
    command = started(
        ["serve", str(gguf.folder), "--port", str(port)], tmp_path / "log", partial(serve_by_a_stand_in, port)
    )
    until(lambda: answers(port))
    family = psutil.Process(command.process.pid).children(recursive=True)
    assert len(family) == 1
    os.kill(command.process.pid, kind)
    command.wait(code)
    psutil.wait_procs(family, timeout=20 if kind == signal.SIGKILL else 0)
    assert alive(family) == []
    with socket.socket() as probe, pytest.raises(ConnectionError):
        probe.connect(("127.0.0.1", port))


@contextmanager
def quantkit_serve(gguf, *options):
    """`quantkit serve` with the real server in a process of its own, which has told its URL."""
    port = free_port()
    words = ["serve", str(gguf.folder), "--port", str(port), "--threads", "1", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "quantkit", *words],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == f"http://127.0.0.1:{port}/v1 serves tiny\n"
        yield process, port
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def run_client_of_the_docs(client, port):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if client in block)
    code = code.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace('model="demo"', 'model="tiny"')
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "LANGSMITH_TRACING": "false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout  # what it printed, at least the end of the line


@pytest.mark.parametrize(("engine", "runs"), [("llamacpp", "llama_cpp.server"), ("xllamacpp", "llama_server.py")])
def test_the_real_server_is_measured_and_ends_while_it_answers(engine, runs, gguf):
    pytest.importorskip(SERVERS[engine].modules[0], reason=SERVERS[engine].install)
    with quantkit_serve(gguf, "--engine", engine) as (process, port):
        answers = []
        for api, concurrency in (("completions", 1), ("completions", 3), ("chat", 3)):
            spec = LoadTestSpec(requests=6, concurrency=concurrency, max_tokens=8, duration=60)
            report = run_load_test(
                Endpoint(f"http://127.0.0.1:{port}/v1", "tiny", api), spec, ("the first", "the second")
            )
            assert report.counts == {OK: 6}, report.examples
            answers.append(report.find("tokens_per_answer").value)
        # No request cuts another one's answer off, as by this server's own default.
        assert answers[0] == answers[1] > 0
        run_client_of_the_docs("openai", port)
        family = psutil.Process(process.pid).children(recursive=True)
        assert any(word.endswith(runs) for child in family for word in child.cmdline())
        body = {"model": "tiny", "prompt": "a", "max_tokens": 200, "stream": True}
        with httpx2.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120) as response:
            next(response.iter_lines())
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 143
        assert alive(family) == []


def test_requests_are_answered_at_once_each_with_its_own_context(shared_data, tmp_path):
    pytest.importorskip("xllamacpp", reason=SERVERS["xllamacpp"].install)
    made = convert(str(shared_data / "stories260k"), "gguf", "Q8_0", out=tmp_path / "stories")
    with (
        quantkit_serve(made, "--parallel", "3", "--n-ctx", "512", "--name", "tiny") as (process, port),
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
        ThreadPoolExecutor() as pool,
    ):
        body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
        answers = pool.map(lambda _: client.post("/v1/completions", json=body), range(6))
        until(lambda: [slot["is_processing"] for slot in client.get("/slots").json()] == [True] * 3)
        # Answers longer than the context divided by three.
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [400] * 6
        assert client.post("/v1/completions", json=body | {"prompt": "Lily " * 512}).status_code == 400
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130


def test_the_server_of_a_gguf_file_is_the_first_that_the_interpreter_has(gguf, bare):
    folder, python = str(gguf.folder), python_in(bare)
    chosen = partial(plan_server, folder, python=python)
    assert chosen().server.name == "xllamacpp"
    put_empty(packages_of(bare), *SERVERS["llamacpp"].modules)
    assert chosen().server.name == "llamacpp"
    put_empty(packages_of(bare), "xllamacpp")
    assert chosen().server.name == "xllamacpp"
    metadata = packages_of(bare) / "xllamacpp-2026.9.11063.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: xllamacpp\nVersion: 2026.9.11063\n")
    assert chosen().server.name == "llamacpp"
    says = r"has xllamacpp 2026\.9\.11063; quantkit needs .* pip install 'quantkit-lm\[xllamacpp\]'"
    with pytest.raises(DependencyError, match=says), serving(chosen("xllamacpp")):
        pass


@pytest.mark.slow
def test_langchain_is_a_client(gguf):
    pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    with quantkit_serve(gguf) as (_, port):
        run_client_of_the_docs("langchain_openai", port)


def test_an_address_that_is_taken_or_not_ours_is_refused(gguf):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launch = plan_server(str(gguf.folder), port=taken.getsockname()[1])
        with pytest.raises(OutputError, match="Give another --port"), serving(launch):
            pass
    with (
        pytest.raises(OutputError, match="is not available"),
        serving(plan_server(str(gguf.folder), host="203.0.113.7")),
    ):
        pass


def test_an_engine_that_is_missing_or_ends_before_it_answers_is_told(gguf, bare):
    launch = plan_server(str(gguf.folder), "llamacpp", python=python_in(bare), port=free_port())
    says = r"lacks llama_cpp, .*pip install 'quantkit-lm\[serve\]'"
    with pytest.raises(DependencyError, match=says), serving(launch):
        pass
    with pytest.raises(DependencyError, match="cannot be run"), serving(plan_server(str(gguf.folder), python="/none")):
        pass
    put_empty(packages_of(bare), *SERVERS["llamacpp"].modules)
    begin = time.monotonic()
    with pytest.raises(EngineError, match="ended with code 1 before it answered"), serving(launch):
        pass
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(("options", "error", "says"), [
    ({"port": 0}, RecipeError, "port = 0 cannot be used"),
    ({"threads": 0}, RecipeError, "threads = 0 cannot be used"),
    ({"name": "--trust-remote-code"}, RecipeError, "begins with a dash"),
    ({"python": "a\x1bb"}, RecipeError, "is unprintable"),
    ({"parallel": 257}, RecipeError, "parallel = 257 cannot be used"),
    ({"engine": "llamacpp", "parallel": 2}, RecipeError, "does not take --parallel"),
    ({"engine": "xllamacpp", "n_ctx": 1 << 20}, RecipeError, "has at most"),
    ({"engine": "vlm"}, RecipeError, "Did you mean 'vllm'"),
    ({"engine": "vllm"}, UnsupportedError, "vllm-gguf-plugin 0.0.5 has kernels for GPUs only"),
])  # fmt: skip
def test_what_cannot_work_is_refused(gguf, options, error, says):
    with pytest.raises(error, match=says):
        plan_server(str(gguf.folder), **options)


def test_what_vllm_and_exllama_do_not_load_is_refused(artifact_of):
    made = artifact_of("gptq", "4", sym=False, group_size=32)
    with pytest.raises(UnsupportedError, match="symmetric"):
        plan_server(str(made.folder), "vllm")
    plain = artifact_of("gptq", "4", group_size=32)
    assert plan_server(str(plain.folder)).server.name == "vllm"
    with pytest.raises(UnsupportedError, match=r"llama-cpp-python's server cannot serve .* \(gptq-4"):
        plan_server(str(plain.folder), "llamacpp")


def test_each_command_is_shown(gguf, tiny):
    for engine in SERVERS.keys() - {"mlx"}:  # which takes neither a context nor a name
        subject = gguf.folder if "llama" in engine else tiny
        words = ("--engine", engine, "--print", "--port", 8123, "--n-ctx", 64, "--name", "my model")
        done = succeeds("serve", subject, *words)
        for part in ("8123", "64", str(subject.resolve()) if engine != "tabbyapi" else subject.name):
            assert part in done.out
        assert ("'my model'" in done.out) == (engine not in ("tgi", "tabbyapi"))


def test_vllm_gets_the_asked_threads_and_a_store_that_fits(tiny, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    variables = plan_server(str(tiny), "vllm", threads=3).variables
    assert variables == {"OMP_NUM_THREADS": "3", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "4"}
