"""No key and no password is printed or stored, and what a server says cannot steer the terminal."""

import json
from base64 import b64encode

import pytest
from faulty_server import DONE, OPENING, event, faulty, refusal, sends
from tiny_models import fails

from quantkit.errors import RecipeError
from quantkit.recipe import LoadTestSpec
from quantkit.serving.client import EXAMPLE_CHARACTERS, Endpoint
from quantkit.serving.load_test import load

KEY = 'sk-"geheim"/+1'
PASSWORD = "p4ss-w0rd"
SPEC = LoadTestSpec(requests=1, warm_up=0, duration=20)


@pytest.mark.parametrize(
    "url",
    [
        f"ftp://me:{PASSWORD}@host/v1",
        f"http://me:{PASSWORD}@host:port/v1",
        f"http://me:a/{PASSWORD}@host/v1",
        f"http://me:a@{PASSWORD}@host:0x/v1",
        f"http://host/v1?key=a@{PASSWORD}",
        f"http://[{PASSWORD}/v1?{PASSWORD}",
    ],
)
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


# The key begins within what is kept, and ends beyond it.
echo_at_the_edge = sends(refusal(401, b"x" * (EXAMPLE_CHARACTERS - 5) + KEY.encode() + b"y" * 40_000))


@pytest.mark.parametrize("way", [echo, echo_as_event, echo_at_the_edge])
def test_a_key_that_a_server_repeats_is_not_stored(way):
    with faulty(way) as server:
        report = load(Endpoint(server.url, "tiny", key=KEY), SPEC, ("a",))
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
        report = load(Endpoint(server.url.replace("http://", f"http://me:{PASSWORD}@"), "tiny"), SPEC, ("a",))
    pair = b64encode(f"me:{PASSWORD}".encode()).decode()
    assert f"authorization: basic {pair}".lower() in server.headers[-1].lower()
    assert [example.lower() for example in report.examples.values()] == ["authorization: basic ***"]
    assert report.endpoint == server.url
    for secret in (PASSWORD, pair):
        assert secret not in report.model_dump_json()


STEERING = "\x1b[2J\x1b]0;title\x07\x9b31m\r\u202e\x00"


@pytest.mark.parametrize(
    "way",
    [
        sends(OPENING, event(error=f"full{STEERING}\nerror: done")),
        sends(b"HTTP/1.1 503 No\r\nconnection: close\r\n\r\n" + STEERING.encode() * 2000),
    ],
)
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
