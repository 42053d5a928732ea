"""A server of OpenAI's API that fails in the ways it is told to, one way for each request in turn."""

import asyncio
import contextlib
import json
import socket
import sys
import threading
from dataclasses import dataclass, field
from functools import partial

OPENING = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
PAUSE = 0.01  # seconds between two tokens of a good answer


def event(**values):
    return f"data: {json.dumps(values)}\n\n".encode()


def token(text=" a"):
    return event(choices=[{"text": text, "index": 0}])


DONE = b"data: [DONE]\n\n"


async def good(server, out, body, usage=True):
    """Four tokens, in the words of the API that was asked for, then the count, then the end."""
    out.write(OPENING)
    chat = "messages" in body
    if chat:
        out.write(event(choices=[{"delta": {"role": "assistant"}}]))
    for _ in range(4):
        await asyncio.sleep(server.pause)
        out.write(event(choices=[{"delta": {"content": " a"}}]) if chat else token())
        await out.drain()
    if usage:
        out.write(event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 4}))
    out.write(DONE)


uncounted = partial(good, usage=False)


def refusal(code, said):
    return f"HTTP/1.1 {code} No\r\nconnection: close\r\ncontent-length: {len(said)}\r\n\r\n".encode() + said


def sends(*parts, then=0.0):
    """Sends the parts, waits, and closes the connection."""

    async def way(_server, out, _body):
        out.write(b"".join(parts))
        await out.drain()
        await asyncio.sleep(then)

    return way


def status(code):
    return sends(refusal(code, b'{"error": "slow down"}'))


async def endless(_server, out, _body):
    out.write(OPENING)
    while True:
        out.write(token())
        await out.drain()
        await asyncio.sleep(PAUSE)


async def cut(_server, out, _body):
    """Resets the connection in the middle of an answer."""
    out.write(OPENING + token())
    await out.drain()
    await asyncio.sleep(PAUSE)
    out.transport.abort()


@dataclass
class FaultyServer:
    """`ways` are taken in turn, the last one for all that follow."""

    ways: list
    pause: float = PAUSE
    seen: list = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    max_in_flight: int = 0
    url: str = ""
    answering: int = 0
    tasks: set = field(default_factory=set)

    async def _handle(self, reader, out):
        task = asyncio.current_task()
        self.tasks.add(task)
        self.answering += 1
        self.max_in_flight = max(self.max_in_flight, self.answering)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(int(line.split(":")[1]) for line in head.lower().splitlines() if "content-length" in line)
            body = json.loads(await reader.readexactly(length))
            way = self.ways[min(len(self.seen), len(self.ways) - 1)]
            self.seen.append(body)
            self.headers.append(head)
            await way(self, out, body)
            await out.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.answering -= 1
            out.close()
            await _closed(out)
            self.tasks.discard(task)


async def _closed(out):
    """Wait until the connection is gone; a cancelled wait gives up what is not sent yet."""
    gone = asyncio.ensure_future(out.wait_closed())
    while not gone.done():
        try:
            await asyncio.wait([gone])
        except asyncio.CancelledError:
            out.transport.abort()
    gone.exception()  # the other side may have ended it


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


ANSWERS = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Models(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Models).serve_forever()
"""


def answering(port):
    """The command of a server that says at once that it has models."""
    return (sys.executable, "-c", ANSWERS, str(port))


@contextlib.contextmanager
def faulty(*ways, pause=PAUSE):
    """Run such a server on a free port of this machine."""
    server = FaultyServer(list(ways), pause)
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()

    async def serve():
        listening = await asyncio.start_server(server._handle, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        ready.set()
        await stop.wait()
        # Closed last: asyncio loses a connection that it is just accepting.
        while asyncio.all_tasks() != {asyncio.current_task()}:
            for task in server.tasks:
                task.cancel()
            await asyncio.sleep(0.01)
        listening.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
