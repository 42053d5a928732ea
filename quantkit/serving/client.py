"""A client for one streamed request to an OpenAI-compatible server.

https://platform.openai.com/docs/api-reference/completions: the answer is a stream of server-sent events, each with a
JSON object, ended by `[DONE]`. `send` always returns within its timeouts, and records how a request failed.
"""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

import httpx2

from quantkit.errors import RecipeError, one_line
from quantkit.records.recipe import LoadTestSpec

OK, UNFINISHED = "ok", "unfinished"
APIS = {"completions": "/completions", "chat": "/chat/completions"}
EXAMPLE_CHARACTERS = 200  # of a server's error text in a report
READ_BYTES = 1 << 14  # of an error response
LARGEST_COUNT = 1 << 31  # tokens of one request, as a server counts them
EVENT_BYTES = 1 << 20  # of one event; a longer one is malformed

# The kinds of failure with their meanings; a status such as 429 is the kind `http 429`.
KINDS = {
    "refused": "no connection: no server listens there, or the host is unknown",
    "connect timeout": "no connection within the limit",
    "first token timeout": "no token within the limit",
    "stalled": "a longer pause between two tokens than the limit",
    "timeout": "the whole answer took longer than the limit",
    "disconnected": "the connection broke, or the stream ended without its end mark",
    "malformed": "the answer is not a stream of events, or an event is not valid JSON of the API",
    "server error": "the stream itself reported an error",
    "empty": "the stream ended without tokens and without a finish reason",
    UNFINISHED: "the measurement ended first; not a failure",
}
# Kinds of the client's exceptions; the first match wins.
KIND_OF: dict[type[Exception], str] = {
    httpx2.ConnectTimeout: "connect timeout",
    httpx2.ConnectError: "refused",
    httpx2.SSEError: "malformed",
    httpx2.DecodingError: "malformed",
    UnicodeDecodeError: "malformed",
    Exception: "disconnected",
}


@dataclass
class Answer:
    """The result of one request; times are `time.perf_counter()` in seconds.

    `due`: when it should have been sent. `stamps`: when each text chunk arrived. `prompt_tokens`, `new_tokens` and
    `reason` (finish reason) are the server's, None or empty if not reported. `kind`: OK or the kind of failure;
    `message`: its text.
    """

    due: float
    kind: str = UNFINISHED
    message: str = ""
    ended: float = 0.0
    stamps: list[float] = field(default_factory=list)
    reason: str = ""
    prompt_tokens: int | None = None
    new_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Return the number of new tokens reported by the server, else the number of text chunks."""
        return len(self.stamps) if self.new_tokens is None else self.new_tokens


class _Failure(Exception):  # noqa: N818 - a signal, not an error
    """Raised to end a request with a failure kind that no client exception covers, and an example message."""


@dataclass(frozen=True)
class Endpoint:
    """A server's base URL, such as ``http://127.0.0.1:8000/v1``, with the model's name there and the API to use."""

    url: str
    model: str
    api: Literal["completions", "chat"] = "completions"
    key: str | None = None

    def __post_init__(self) -> None:
        # Messages never repeat the URL, which may contain a password.
        try:
            parts = httpx2.URL(self.url)
        except (httpx2.InvalidURL, ValueError):
            raise RecipeError("the endpoint is not a URL; give http://HOST:PORT/v1") from None
        if parts.scheme not in ("http", "https") or not parts.host:
            raise RecipeError("the endpoint must begin with http:// or https://, and name a host")
        if "?" in self.url or "#" in self.url:
            raise RecipeError("the endpoint has a query or a fragment; give http://HOST:PORT/v1")
        if parts.port is not None and not 1 <= parts.port <= 65535:
            raise RecipeError(f"the endpoint has the port {parts.port}, which is not between 1 and 65535")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable()):
            raise RecipeError("the endpoint's key has characters that an HTTP header cannot contain")

    @property
    def shown(self) -> str:
        """Return the URL without its password."""
        return str(httpx2.URL(self.url).copy_with(username=None, password=None))

    def without_secrets(self, text: str) -> str:
        """Return the beginning of a message as one printable line, without key and password."""
        parts = httpx2.URL(self.url)
        plain = [secret for secret in (self.key, parts.password) if secret]
        if parts.password:
            plain.append(b64encode(f"{parts.username}:{parts.password}".encode()).decode())
        spellings = {spell(secret).strip("'\"") for secret in plain for spell in (str, quote, repr, json.dumps)}
        for secret in sorted(filter(None, spellings), key=len, reverse=True):
            text = text.replace(secret, "***")
        beginning = text[:EXAMPLE_CHARACTERS].encode("utf-8", "backslashreplace").decode("utf-8")
        return one_line(beginning, 10 * EXAMPLE_CHARACTERS)  # an unprintable character becomes several

    def client(self, connections: int, connect_timeout: float) -> httpx2.AsyncClient:
        """Return an HTTP client for `connections` concurrent requests; it uses no proxies and follows no redirects."""
        return httpx2.AsyncClient(
            headers={} if self.key is None else {"Authorization": f"Bearer {self.key}"},
            timeout=httpx2.Timeout(None, connect=connect_timeout),
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,
        )


async def send(client: httpx2.AsyncClient, endpoint: Endpoint, prompt: str, spec: LoadTestSpec, answer: Answer) -> None:
    """Send a request and record its result in `answer` as it arrives; after cancellation it stays incomplete."""
    loop = asyncio.get_running_loop()
    url = endpoint.url.rstrip("/") + APIS[endpoint.api]
    text = {"messages": [{"role": "user", "content": prompt}]} if endpoint.api == "chat" else {"prompt": prompt}
    # Greedy, with the server's own count of tokens at the end.
    settings = {"max_tokens": spec.max_tokens, "temperature": 0, "stream": True}
    body = {"model": endpoint.model, **text, **settings, "stream_options": {"include_usage": True}}
    pause, whole = asyncio.timeout(spec.ttft_timeout), asyncio.timeout(spec.timeout)
    try:
        async with whole, pause, client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                raise _Failure(f"http {response.status_code}", await _beginning(response))
            async for event in httpx2.EventSource(response, EVENT_BYTES):
                if event.data == "[DONE]":
                    break
                if _record_event(event.data, answer):
                    pause.reschedule(loop.time() + spec.pause_timeout)
            else:
                raise _Failure("disconnected", "the stream ended without [DONE]")
        # A model may end its answer at once: then there is a finish reason but no token.
        answer.kind = OK if answer.stamps or answer.reason else "empty"
    except TimeoutError:
        # Both limits raise the same error; check which one has expired.
        answer.kind = "timeout" if whole.expired() else "stalled" if answer.stamps else "first token timeout"
    except _Failure as failure:
        answer.kind, message = failure.args
        answer.message = endpoint.without_secrets(message)
    except (httpx2.RequestError, httpx2.StreamError, UnicodeDecodeError) as error:
        answer.kind = next(kind for exception, kind in KIND_OF.items() if isinstance(error, exception))
        answer.message = endpoint.without_secrets(str(error) or type(error).__name__)
    finally:
        answer.ended = time.perf_counter()


def _record_event(data: str, answer: Answer) -> bool:
    """Record a server-sent event; return whether it contained text. Raises _Failure."""
    try:
        values = json.loads(data)
        if values.get("error"):
            raise _Failure("server error", str(values["error"]))
        if usage := values.get("usage"):
            answer.prompt_tokens, answer.new_tokens = _count(usage["prompt_tokens"]), _count(usage["completion_tokens"])
        text = ""
        for choice in values["choices"]:
            delta = choice.get("delta") or choice
            answer.reason = str(choice.get("finish_reason") or answer.reason)[:EXAMPLE_CHARACTERS]
            text += delta.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise _Failure("malformed", f"{type(error).__name__} in {data!r}") from None
    if text:
        answer.stamps.append(time.perf_counter())
    return bool(text)


def _count(value: Any) -> int:
    if not 0 <= (tokens := int(value)) <= LARGEST_COUNT:
        raise ValueError("not a number of tokens")
    return tokens


async def _beginning(response: httpx2.Response) -> str:
    """Return the first READ_BYTES or so of an error response: more than is shown, so that a key can be masked."""
    read = b""
    async for part in response.aiter_bytes():
        read += part
        if len(read) >= READ_BYTES:
            break
    return read.decode("utf-8", "replace").strip()
