"""One streamed request to a server that speaks OpenAI's API, and what became of it.

https://platform.openai.com/docs/api-reference/completions: the answer is a stream of server-sent events, each with a
JSON object, ended by `[DONE]`. Whatever a server does, `ask` returns within its limits and names the kind of failure.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2

from quantkit.errors import RecipeError

OK, UNFINISHED = "ok", "unfinished"
APIS = {"completions": "/completions", "chat": "/chat/completions"}
EXAMPLE_CHARACTERS = 200  # kept of what a server says about a failure
MOST_TOKENS = 1 << 31  # that a server can count for one request
EVENT_BYTES = 1 << 20  # of one event; a longer one is malformed

# The kinds of failure, with what each means. `http 429` and its like are named by their status.
KINDS = {
    "refused": "no connection: nothing listens there, or the name is unknown",
    "connect timeout": "no connection within the limit",
    "first token timeout": "no token within the limit",
    "stalled": "a longer pause between two tokens than the limit",
    "timeout": "the whole answer took longer than the limit",
    "disconnected": "the connection broke, or the stream ended without its end mark",
    "malformed": "an answer that is no stream of events, or an event that is no valid JSON of the API",
    "server error": "the stream itself reported an error",
    "empty": "the stream ended with neither a token nor a reason why",
    UNFINISHED: "the time of the measurement was over first: not a failure",
}


@dataclass(frozen=True)
class Limits:
    """Seconds until a request is given up: for the connection, the first token, a pause, the whole answer."""

    connect: float = 10.0
    first_token: float = 60.0
    pause: float = 30.0
    whole: float = 300.0


@dataclass
class Answer:
    """What became of one request; times are `time.perf_counter()` in seconds.

    `due` is when it should have been sent, `stamps` when each piece of text came. `prompt_tokens` and `new_tokens` are
    the server's own counts, None where it does not tell them. `reason` is why it says that the answer ended. `kind` is
    OK or the kind of failure, `said` an example.
    """

    due: float
    kind: str = UNFINISHED
    said: str = ""
    sent: float = 0.0
    ended: float = 0.0
    stamps: list[float] = field(default_factory=list)
    reason: str = ""
    prompt_tokens: int | None = None
    new_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """New tokens: as the server counts them, else one for each piece of text."""
        return len(self.stamps) if self.new_tokens is None else self.new_tokens


class _Bad(Exception):  # noqa: N818 - a signal, not an error
    """Ends a request with a kind of failure that no exception of the client stands for."""

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(said)
        self.kind, self.said = kind, said


@dataclass(frozen=True)
class Endpoint:
    """A server's base URL, such as ``http://127.0.0.1:8000/v1``, the name of the model there, and the API to use."""

    url: str
    model: str
    api: str = "completions"
    key: str | None = None

    def __post_init__(self) -> None:
        try:
            parts = httpx2.URL(self.url)
        except httpx2.InvalidURL as error:
            raise RecipeError(f"the endpoint {self.url!r} is no URL ({error}); give http://HOST:PORT/v1") from None
        if parts.scheme not in ("http", "https") or not parts.host:
            raise RecipeError(f"the endpoint {self.url!r} must begin with http:// or https://, and name a host")
        if parts.query or parts.fragment:
            raise RecipeError(f"the endpoint {self.url!r} has a query or a fragment; give http://HOST:PORT/v1")
        if parts.port is not None and not 1 <= parts.port <= 65535:
            raise RecipeError(f"the endpoint {self.url!r} has the port {parts.port}, which is not between 1 and 65535")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable()):
            raise RecipeError("the endpoint's key holds characters that a header cannot carry")
        if self.api not in APIS:
            raise RecipeError(f"unknown API {self.api!r}; known: {', '.join(APIS)}")

    @property
    def shown(self) -> str:
        """The URL without a password."""
        return str(httpx2.URL(self.url).copy_with(username=None, password=None))

    def client(self, connections: int, limits: Limits) -> httpx2.AsyncClient:
        """A client for at most so many requests at once. Neither proxies nor redirects: the server itself is timed."""
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(None, connect=limits.connect),
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,
        )

    def body(self, prompt: str, new_tokens: int) -> dict[str, Any]:
        """The request: greedy, streamed, with the server's own count of tokens at the end."""
        text = {"prompt": prompt} if self.api == "completions" else {"messages": [{"role": "user", "content": prompt}]}
        return {
            "model": self.model,
            **text,
            "max_tokens": new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def ask(
    client: httpx2.AsyncClient, to: Endpoint, prompt: str, new_tokens: int, limits: Limits, a: Answer
) -> None:
    """Send one request and write what comes of it into `a` while it comes. Cancelled, it leaves `a` unfinished."""
    loop = asyncio.get_running_loop()
    a.sent = time.perf_counter()
    url = to.url.rstrip("/") + APIS[to.api]
    pause = asyncio.timeout(limits.first_token)
    whole = asyncio.timeout(limits.whole)
    try:
        async with whole, pause, client.stream("POST", url, json=to.body(prompt, new_tokens)) as response:
            if response.status_code != 200:
                raise _Bad(f"http {response.status_code}", await _beginning(response))
            ended = False
            async for event in httpx2.EventSource(response, EVENT_BYTES):
                if event.data == "[DONE]":
                    ended = True
                    break
                if _take(event.data, a):
                    pause.reschedule(loop.time() + limits.pause)
            if not ended:
                raise _Bad("disconnected", "the stream ended without [DONE]")
        # A model may end its answer at once: then there is a reason why it ended, and no token.
        a.kind = OK if a.stamps or a.reason else "empty"
    except TimeoutError:
        # The inner limit turns into the error that the outer one sees; only one of them has expired.
        a.kind = "timeout" if whole.expired() else "stalled" if a.stamps else "first token timeout"
    except _Bad as bad:
        a.kind, a.said = bad.kind, bad.said
    except httpx2.ConnectTimeout as error:
        a.kind, a.said = "connect timeout", str(error)
    except httpx2.ConnectError as error:
        a.kind, a.said = "refused", str(error)
    except (httpx2.SSEError, httpx2.DecodingError, UnicodeDecodeError) as error:
        a.kind, a.said = "malformed", str(error)
    except (httpx2.TransportError, httpx2.StreamError) as error:
        a.kind, a.said = "disconnected", str(error) or type(error).__name__
    finally:
        a.ended = time.perf_counter()


def _take(data: str, a: Answer) -> bool:
    """Note one event; whether it brought text. Raises _Bad."""
    try:
        values = json.loads(data)
        if not isinstance(values, dict):
            raise TypeError("no JSON object")
        if values.get("error"):
            raise _Bad("server error", _example(str(values["error"])))
        if usage := values.get("usage"):
            a.prompt_tokens, a.new_tokens = _count(usage["prompt_tokens"]), _count(usage["completion_tokens"])
        text = ""
        for choice in values["choices"]:
            delta = choice.get("delta") or choice
            a.reason = str(choice.get("finish_reason") or a.reason)
            text += delta.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise _Bad("malformed", f"{type(error).__name__} in {_example(data)!r}") from None
    if text:
        a.stamps.append(time.perf_counter())
    return bool(text)


def _count(value: Any) -> int:
    found = int(value)
    if not 0 <= found <= MOST_TOKENS:
        raise ValueError("no number of tokens")
    return found


def _example(said: str) -> str:
    """The beginning of what a server said, as text that can be written anywhere."""
    return said[:EXAMPLE_CHARACTERS].encode("utf-8", "backslashreplace").decode("utf-8")


async def _beginning(response: httpx2.Response) -> str:
    """The first characters of a refusal."""
    found = b""
    async for part in response.aiter_bytes():
        found += part
        if len(found) >= EXAMPLE_CHARACTERS:
            break
    return found[:EXAMPLE_CHARACTERS].decode("utf-8", "replace").strip()
