import json
import random
import socket
import time
from base64 import b64encode
from functools import partial

import numpy as np
import pytest
from faulty_server import DONE, OPENING, cut, endless, event, faulty, free_port, good, refusal, sends, status, token
from tiny_models import fails, quantkit, succeeds

from quantkit.data.texts import PROMPTS
from quantkit.errors import RecipeError
from quantkit.records.recipe import LoadTestSpec
from quantkit.serving.client import EXAMPLE_CHARACTERS, OK, UNFINISHED, Answer, Endpoint
from quantkit.serving.load_test import measured, prompts_of, run_load_test

# Short only where that very limit is to strike: a busy machine may be late with anything.
SHORT = {"first token timeout": {"ttft_timeout": 0.4}, "stalled": {"pause_timeout": 0.3}, "timeout": {"timeout": 0.8}}
KEY = 'sk-"geheim"/+1'
PASSWORD = "p4ss-w0rd"
SPEC = LoadTestSpec(requests=1, warm_up=0, duration=20)
# The key begins within what is kept, and ends beyond it.
echo_at_the_edge = sends(refusal(401, b"x" * (EXAMPLE_CHARACTERS - 5) + KEY.encode() + b"y" * 40_000))
STEERING = "\x1b[2J\x1b]0;title\x07\x9b31m\r\u202e\x00"


def put(url, **settings):
    return run_load_test(Endpoint(url, "tiny"), LoadTestSpec.model_validate({"duration": 30, "warm_up": 0, **settings}))


@pytest.mark.parametrize(("way", "kind"), [
    (status(500), "http 500"),
    (cut, "disconnected"),
    (sends(OPENING, then=5), "first token timeout"),
    (sends(OPENING, token(), then=5), "stalled"),
    (endless, "timeout"),
    (sends(OPENING, token(), event(error={"message": "out of memory"})), "server error"),
    (sends(OPENING, event(choices=[{"text": ""}]), DONE), "empty"),
    (sends(OPENING, b"data: {not json\n\n"), "malformed"),
    (sends(OPENING, token()), "disconnected"),  # no [DONE]
    (sends(b"what?\r\n\r\n"), "disconnected"),  # no HTTP
    (sends(OPENING.replace(b"text/event-stream", b"text/html"), b"<html>"), "malformed"),
    (sends(OPENING, b'data: {"choices": [null]}\n\n'), "malformed"),
    (sends(OPENING, b"data: " + b"x" * (2 << 20) + b"\n\n"), "malformed"),
    (sends(OPENING, b"data: " + b"[" * 200_000 + b"\n\n"), "malformed"),
    (sends(OPENING, event(choices=[], usage={"prompt_tokens": 1, "completion_tokens": -3}), DONE), "malformed"),
    (sends(OPENING, event(choices=[{"text": "", "finish_reason": "stop"}]), DONE), OK),  # it ended at once
    (sends(OPENING, b": a comment\n\n", b'data: {"choices": [{"text": "\xff"}]}\n\n', DONE), OK),  # replaced
])  # fmt: skip
def test_each_kind_of_failure_is_told_by_its_name(way, kind):
    with faulty(way) as server:
        report = put(server.url, requests=1, **SHORT.get(kind, {}))
    assert (report.counts, report.completed, report.failed) == ({kind: 1}, kind == OK, kind != OK)


def test_counts_of_a_mixture_are_exact():
    ways = [good, status(429), good, cut, status(429), sends(OPENING, b"data: {\n\n"), good, status(500), good]
    with faulty(*ways) as server:
        report = put(server.url, requests=len(ways))
    assert report.counts == {OK: 4, "http 429": 2, "disconnected": 1, "malformed": 1, "http 500": 1}
    assert report.examples["http 429"] == '{"error": "slow down"}'
    assert (report.completed, report.failed) == (4, 5)
    assert [body["prompt"] for body in server.seen] == [PROMPTS[i % 9] for i in range(9)]


def test_a_server_that_is_down_is_told_at_once():
    begin = time.monotonic()
    report = put(f"http://127.0.0.1:{free_port()}/v1", warm_up=1)
    assert report.counts == {"refused": 1}
    assert time.monotonic() - begin < 5


def test_a_server_that_takes_no_connection_ends_at_the_limit():
    with socket.socket() as full:  # its queue is full, so the handshake is never finished
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fill = [socket.socket() for _ in range(3)]
        try:
            for one in fill:
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            url = f"http://127.0.0.1:{full.getsockname()[1]}/v1"
            assert put(url, requests=1, warm_up=1, connect_timeout=0.3).counts == {"connect timeout": 1}
        finally:
            for one in fill:
                one.close()


@pytest.mark.parametrize("way", [endless, sends(OPENING, then=60)])
def test_it_ends_on_time(way):
    timeouts = dict.fromkeys(("connect_timeout", "ttft_timeout", "pause_timeout", "timeout"), 60.0)
    with faulty(way) as server:
        begin = time.monotonic()
        report = put(server.url, duration=0.7, concurrency=3, **timeouts)
        took = time.monotonic() - begin
    assert 0.6 <= took < 5
    assert report.seconds == pytest.approx(0.7, abs=0.05)
    if way is endless:
        assert report.counts == {UNFINISHED: 3}
        assert report.find("output_tokens_per_second").value > 30  # what has come is counted, though no answer ended


def test_a_rate_above_what_the_server_can_waits_and_says_so():
    with faulty(good, pause=0.05) as server:
        report = put(server.url, request_rate=100.0, concurrency=2, requests=10)
    assert server.max_in_flight == report.find("max_in_flight").value == 2
    assert report.counts == {OK: 10}
    assert any("waited since 2 were open" in note for note in report.notes)
    # 10 answers of 0.2 s, two at a time: the wait of the last ones counts.
    assert report.find("latency_ms").details["p99"] > 600


@pytest.mark.parametrize(("api", "text"), [("completions", "prompt"), ("chat", "messages")])
def test_what_is_sent(api, text):
    """The warm-up does not count."""
    with faulty(status(500), good) as server:
        endpoint = Endpoint(server.url, "tiny", api, key="secret")
        report = run_load_test(endpoint, LoadTestSpec(requests=1, max_tokens=5, warm_up=1), ("hello",))
    assert len(server.seen) == 2
    assert report.counts == {OK: 1}
    body = server.seen[1]
    assert body[text] == ("hello" if api == "completions" else [{"role": "user", "content": "hello"}])
    assert body.items() >= {"model": "tiny", "max_tokens": 5, "temperature": 0, "stream": True}.items()
    assert "authorization: bearer secret" in server.headers[0].lower()
    assert "secret" not in report.model_dump_json()


def test_a_server_without_counts_is_told():
    with faulty(partial(good, usage=False)) as server:
        report = put(server.url, requests=2)
    assert report.find("tokens_per_answer").value == 4
    assert report.find("total_tokens_per_second") is None
    assert any("each chunk of text counts as one" in note for note in report.notes)


def test_the_figures_by_hand():
    # Answers of 3 pieces with 6 tokens as the server counts, and of 2 with 4; one is cut off after 2 pieces.
    one = Answer(0.0, OK, "", 1.1, [0.4, 0.6, 1.0], prompt_tokens=10, new_tokens=6)
    two = Answer(1.0, OK, "", 2.6, [1.8, 2.5], prompt_tokens=20, new_tokens=4)
    rest = Answer(2.6, UNFINISHED, "", 3.0, [2.7, 2.9])
    failed = Answer(2.6, "http 500", "", 2.7)
    figures = {m.name: m for m in measured([one, two, rest, failed], 4.0, 2, 7.2)}
    assert figures["ttft_ms"].value == pytest.approx((400 + 800) / 2)  # from when it was due
    assert figures["tpot_ms"].details["mean"] == pytest.approx((600 / 5 + 700 / 3) / 2)
    assert figures["itl_ms"].value == pytest.approx(400)  # of 200, 400, 700
    assert figures["latency_ms"].details["p90"] == pytest.approx(np.percentile([1100, 1600], 90))
    assert figures["requests_per_second"].value == 2 / 4
    new = 6 + 4 + 2 * 2  # two tokens in each piece
    assert figures["output_tokens_per_second"].value == pytest.approx(new / 4)
    assert figures["total_tokens_per_second"].value == pytest.approx((new + 30) / 4)
    assert figures["tokens_per_answer"].value == 5
    assert figures["cost_per_1000_tokens"].value == pytest.approx(7.2 / 3600 * 4 / new * 1000)
    assert figures["cost_per_million_requests"].value == pytest.approx(7.2 / 3600 * 4 / 2 * 1e6)


def test_what_is_no_endpoint_and_a_key_that_no_header_can_carry_are_refused():
    for url in ("127.0.0.1:8000", "file:///etc/passwd", "http://"):
        with pytest.raises(RecipeError, match="must begin with http"):
            Endpoint(url, "tiny")
    for key in ("Schlüssel", "two\nlines"):
        with pytest.raises(RecipeError, match="key"):
            Endpoint("http://x/v1", "tiny", key=key)


def test_the_times_of_requests_follow_the_seed(monkeypatch):
    seeds, plain = [], random.Random
    monkeypatch.setattr(random, "Random", lambda seed: seeds.append(seed) or plain(seed))
    with faulty(good, good) as server:
        assert put(server.url, request_rate=100.0, requests=2, seed=7).counts == {OK: 2}
    assert seeds == [7]


def test_prompts_come_from_a_file(tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\n two \n")
    assert prompts_of(tmp_path / "prompts.txt") == ("one", "two")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(RecipeError):
        prompts_of(tmp_path / "empty.txt")


def test_the_command(tmp_path):
    path = tmp_path / "load.json"
    words = ("--model", "a[/x]", "--requests", 3, "--price-per-hour", 2, "--json", path)
    with faulty(good, good, status(429), good) as server:
        done = succeeds("bench", "--endpoint", server.url, *words)
    for part in ("a[/x] at", "time to first token", "output tokens/s", "http 429", "slow down", "cost per 1,000"):
        assert part in done.out
    assert json.loads(path.read_text())["counts"] == {OK: 2, "http 429": 1}
    with faulty(status(500)) as server:
        fails("bench", "--endpoint", server.url, "--model", "tiny", "--requests", 2)  # nothing was answered
    done = quantkit("bench", "demo", "--concurrency", 4)
    assert done.code == 2
    assert "--concurrency is for servers" in done.err


@pytest.mark.parametrize("url", [
    f"ftp://me:{PASSWORD}@host/v1",
    f"http://me:{PASSWORD}@host:port/v1",
    f"http://me:a/{PASSWORD}@host/v1",
    f"http://me:a@{PASSWORD}@host:0x/v1",
    f"http://host/v1?key=a@{PASSWORD}",
    f"http://[{PASSWORD}/v1?{PASSWORD}",
])  # fmt: skip
def test_an_endpoint_that_is_refused_keeps_its_secrets(url):
    with pytest.raises(RecipeError) as error:
        Endpoint(url, "m")
    told = str(error.value)
    assert "endpoint" in told
    if "[" not in url:  # there it stands where a host stands
        assert PASSWORD not in told
        ended = fails("bench", "--endpoint", url, "--model", "m")
        assert PASSWORD not in ended.err + ended.out
    assert f"?{PASSWORD}" not in told


async def echo(server, out, _body):
    """Refuse with the request's own authorization, as some proxies do, before anything else that would hide it."""
    [said] = [line.encode() for line in server.headers[-1].splitlines() if line.lower().startswith("authorization:")]
    out.write(refusal(401, said))


async def echo_as_event(server, out, _body):
    out.write(OPENING + event(error={"message": f"the key {KEY} is unknown", "head": server.headers[-1]}) + DONE)


@pytest.mark.parametrize("way", [echo, echo_as_event, echo_at_the_edge])
def test_a_key_that_a_server_repeats_is_not_stored(way):
    with faulty(way) as server:
        report = run_load_test(Endpoint(server.url, "tiny", key=KEY), SPEC, ("a",))
    assert report.failed == 1
    text = report.model_dump_json()
    [example] = report.examples.values()
    assert "geheim" not in example
    assert "geheim" not in text
    assert "sk-" not in text
    if way in (echo, echo_as_event):
        assert "***" in example


def test_a_password_that_a_server_repeats_is_not_stored():
    """It travels as Base64 of the pair of user and password."""
    with faulty(echo) as server:
        report = run_load_test(Endpoint(server.url.replace("http://", f"http://me:{PASSWORD}@"), "tiny"), SPEC, ("a",))
    pair = b64encode(f"me:{PASSWORD}".encode()).decode()
    assert f"authorization: basic {pair}".lower() in server.headers[-1].lower()
    assert [example.lower() for example in report.examples.values()] == ["authorization: basic ***"]
    assert report.endpoint == server.url
    for secret in (PASSWORD, pair):
        assert secret not in report.model_dump_json()


@pytest.mark.parametrize("way", [
    sends(OPENING, event(error=f"full{STEERING}\nerror: done")),
    sends(b"HTTP/1.1 503 No\r\nconnection: close\r\n\r\n" + STEERING.encode() * 2000),
])  # fmt: skip
def test_what_a_server_says_is_printed_without_control_characters(way, tmp_path):
    with faulty(way) as server:
        ended = fails(
            *("bench", "--endpoint", server.url, "--model", "a\x1b[31m", "--requests", 1, "--warm-up", 0),
            *("--json", tmp_path / "load.json"),
        )
    assert not set(ended.out + ended.err) & set("\x1b\x07\x9b\x00\r\u202e")
    [example] = json.loads((tmp_path / "load.json").read_text())["examples"].values()
    assert example.isprintable()
    assert 0 < len(example) <= 10 * EXAMPLE_CHARACTERS
