"""A small Hugging Face Hub for pushes, which refuses bytes that are not what their sha256 says; servers in threads."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_aTokenThatNobodyMayReadAnywhere123"
LARGE = (".safetensors", ".gguf", ".bin")  # as in the .gitattributes of a fresh repository


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def git_hash(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.gguf filter=lfs\n"})
    commits: list[str] = field(default_factory=lambda: ["0" * 40])


@dataclass
class Hub:
    """What the hub holds, and every request that it got: method and path, with the bytes of its body.

    `fail` may answer a request otherwise, by a status: it is given the method and the path.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    fail: Callable[[str, str], int | None] = lambda _method, _path: None
    said: str = "no reason"

    def asked(self, method, part):
        """How many requests of this kind there were."""
        return sum(m == method and part in path for m, path, _ in self.requests)

    def sent(self):
        """Bytes of contents that were sent: of large files, and of commits."""
        return sum(size for m, path, size in self.requests if m == "PUT" or "/commit/" in path)


class Answering(BaseHTTPRequestHandler):
    """Answers with bytes or JSON, and keeps no log."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def _answer(self, status, value=None, headers=None):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"content-length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class Handler(Answering):
    hub: Hub

    def do_GET(self):
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        hub.requests.append((self.command, path, len(body)))
        if (status := hub.fail(self.command, path)) is not None:
            self._answer(status, {"error": hub.said})
        elif self.command == "PUT":  # of a signed address, which needs no token
            good = sha256(body) == path.rpartition("/")[2]
            hub.stored |= {sha256(body): body} if good else {}
            self._answer(200 if good else 400, {"error": "other bytes than were announced"})
        elif self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": [{"message": "advice"}]})
        else:
            self._of_a_repository(path, body)

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815, as http.server calls them

    def _create(self, asked):
        name = f"{asked['organization']}/{asked['name']}"
        known = name in self.hub.repositories
        if not known:
            private = asked.get("visibility") == "private" or bool(asked.get("private"))
            self.hub.repositories[name] = Repository(private)
        self._answer(409 if known else 200, {"url": f"{self.hub.url}/{name}", "error": "it is there"})

    def _of_a_repository(self, path, body):
        user, _, rest = path.removeprefix("/api/models/").removeprefix("/").partition("/")
        name, _, rest = rest.partition("/")
        repository = self.hub.repositories.get(f"{user}/{name.removesuffix('.git')}")
        if repository is None:
            self._answer(404, {"error": "Repository not found"}, {"x-error-code": "RepoNotFound"})
            return
        files, what = repository.files, rest.split("/")[0]
        if what in ("", "revision"):
            values = {"id": f"{user}/{name}", "private": repository.private, "sha": repository.commits[-1]}
            self._answer(200, values | {"siblings": [{"rfilename": file} for file in files]})
        elif what == "tree":
            self._answer(200, [self._entry(file, data) for file, data in files.items()])
        elif what == "resolve":
            data = files[rest.split("/", 2)[2]]
            self._answer(200, data, {"etag": f'"{git_hash(data)}"', "x-repo-commit": repository.commits[-1]})
        elif what == "preupload":
            self._answer(200, {"files": [self._mode(file["path"], files) for file in json.loads(body)["files"]]})
        elif rest == "info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            self._answer(200, {"transfer": "basic", "objects": [self._action(one) for one in objects]})
        elif what == "commit":
            self._commit(repository, f"{self.hub.url}/{user}/{name}", body)
        else:
            self._answer(500, {"error": f"not spoken here: {path}"})

    def _entry(self, name, data):
        entry = {"type": "file", "path": name, "size": len(data), "oid": git_hash(data)}
        if name.endswith(LARGE):
            pointer = git_hash(b"version https://git-lfs" + sha256(data).encode())
            entry |= {"oid": pointer, "lfs": {"oid": sha256(data), "size": len(data), "pointerSize": 134}}
        return entry

    def _mode(self, name, files):
        data, large = files.get(name), name.endswith(LARGE)
        oid = None if data is None else sha256(data) if large else git_hash(data)
        return {"path": name, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def _action(self, one):
        upload = {"upload": {"href": f"{self.hub.url}/store/{one['oid']}?X-Amz-Signature=secret"}}
        return {**one, **({} if one["oid"] in self.hub.stored else {"actions": upload})}

    def _commit(self, repository, address, body):
        files = dict(repository.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit", repository.commits[-1]) != repository.commits[-1]:
                self._answer(412, {"error": "A commit has happened since."})
                return
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repository.files = files
        repository.commits.append(hashlib.sha1(body).hexdigest())
        commit = repository.commits[-1]
        self._answer(200, {"commitUrl": f"{address}/commit/{commit}", "commitOid": commit})


@contextmanager
def in_threads(handler):
    """Answer on a free port of this machine, in threads of its own; the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def running():
    hub = Hub()
    with in_threads(type("Bound", (Handler,), {"hub": hub})) as hub.url:
        yield hub
