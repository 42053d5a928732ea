import asyncio
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edits import flip, rehash
from faulty_server import OPENING, answering, faulty, free_port, good, sends, status
from test_load_test import put
from tiny_models import changed_copy, fails

from quantkit.cli.options import out
from quantkit.cli.serving import _print_load
from quantkit.data.texts import PROMPTS
from quantkit.errors import ArtifactError, RecipeError
from quantkit.records.recipe import LoadTestSpec
from quantkit.records.report import this_machine
from quantkit.serving.client import OK, Answer
from quantkit.serving.launch import serving
from quantkit.serving.load_test import FIRST_REST, LONGEST_REST, LoadReport, measured
from quantkit.serving.servers import plan_server

PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def misname_and_rehash(folder):
    path = next(folder.glob("*.gguf"))
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.model", b"tokenizer.ggml.modem"))
    rehash(folder)


CHANGES = {
    "damage": lambda folder: flip(next(folder.glob("*.gguf"))),
    "code": lambda folder: (folder / "modeling_tiny.py").write_text("raise SystemExit\n"),
    "another name": misname_and_rehash,
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_artifact_that_its_manifest_denies_is_not_served(change, gguf, tmp_path):
    folder = Path(shutil.copytree(gguf.folder, tmp_path / "copy"))
    assert plan_server(str(folder)).server.loader == "llamacpp"
    CHANGES[change](folder)
    with pytest.raises(ArtifactError):
        plan_server(str(folder))
    assert fails("serve", folder, "--print", says="ArtifactError").out == ""


@pytest.mark.parametrize(("longest", "wanted"), [(64, 64), (4097, 4096)])
def test_the_context_is_the_model_s_and_at_most_4096_where_none_is_asked_for(longest, wanted, tiny, tmp_path):
    source = changed_copy(tiny, tmp_path / "model", max_position_embeddings=longest)
    for engine, option in (("vllm", "--max-model-len"), ("sglang", "--context-length"), ("tgi", "--max-total-tokens")):
        arguments = plan_server(str(source), engine).arguments
        assert arguments[arguments.index(option) + 1] == str(wanted)
    assert str(longest) in plan_server(str(source), n_ctx=longest).arguments  # more, where that is asked for
    for n_ctx, says in ((longest + 1, f"has at most {longest}"), (0, "n_ctx = 0"), (-1, "n_ctx = -1")):
        with pytest.raises(RecipeError, match=says):
            plan_server(str(source), n_ctx=n_ctx)


def test_the_context_of_a_gguf_is_given_to_its_server(gguf):
    for engine, option in (("xllamacpp", "--n-ctx"), ("llamacpp", "--n_ctx"), ("llama-server", "--ctx-size")):
        arguments = plan_server(str(gguf.folder), engine).arguments
        assert int(arguments[arguments.index(option) + 1]) == gguf.manifest.source.config["max_position_embeddings"]


def test_load_tests_and_waiting_go_past_proxies(gguf, monkeypatch):
    """Which would answer for the server, and be timed."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with faulty(good) as server:
        assert put(server.url, requests=2).counts == {OK: 2}
    monkeypatch.setattr("quantkit.serving.launch.START_LIMIT", 60.0)
    port = free_port()
    launch = replace(plan_server(str(gguf.folder), port=port), arguments=answering(port))
    with serving(launch) as child:
        assert child.poll() is None
    assert child.poll() is not None


def test_after_each_failure_in_a_row_a_caller_rests_longer(monkeypatch):
    rests = []
    plain, here = asyncio.sleep, threading.current_thread()

    async def sleep(seconds):
        # The server sleeps in another thread; once a second the progress is told.
        if threading.current_thread() is here and isinstance(seconds, float):
            rests.append(seconds)
            seconds = 0
        await plain(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with faulty(*[status(500)] * 7, good, good, status(429), sends(OPENING), good, pause=0.001) as server:
        report = put(server.url, requests=12)
    assert report.counts == {"http 500": 7, OK: 3, "http 429": 1, "disconnected": 1}
    doubled = [FIRST_REST * 2**n for n in range(7)]
    assert max(doubled) > LONGEST_REST
    assert rests == [*(min(rest, LONGEST_REST) for rest in doubled), FIRST_REST, 2 * FIRST_REST]


@pytest.mark.parametrize("settings", [{"concurrency": 3}, {"request_rate": 100.0}])
def test_as_many_requests_are_sent_as_asked(settings):
    """Seven are not a multiple of what goes at once; the prompts are taken in turn."""
    with faulty(good, pause=0.001) as server:
        report = put(server.url, requests=7, **settings)
    assert report.counts == {OK: 7}
    assert sorted(body["prompt"] for body in server.seen) == sorted(PROMPTS[:7])


def test_what_is_printed_are_the_measured_percentiles():
    seconds = [0.1, 0.2, 0.4, 0.8, 1.6]
    answers = [Answer(0.0, OK, "", 2 * s, [s, 1.5 * s], prompt_tokens=1, new_tokens=2) for s in seconds]
    spec = LoadTestSpec()
    report = LoadReport(
        endpoint="http://x/v1", model="tiny", api="completions", settings=spec, client=this_machine(), seconds=30.0,
        counts={OK: 5}, examples={}, notes=(), measurements=tuple(measured(answers, 30.0, 1, None)),
    )  # fmt: skip
    with out.capture() as printed:
        _print_load(report)
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in printed.get().splitlines()]
    assert ["", "median", "p90", "p99"] in rows
    for title, factor in (("time to first token, ms", 1), ("time per output token, ms", 0.5), ("whole answer, ms", 2)):
        wanted = (np.percentile(seconds, at) * 1000 * factor for at in (50, 90, 99))
        assert [title, *(f"{value:.1f}" for value in wanted)] in rows
    assert "5 answers in 30.0 s, at most 1 requests at once" in printed.get()
