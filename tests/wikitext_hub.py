"""A hub on this machine that has Salesforce/wikitext, as far as the package `datasets` asks for it."""

import hashlib
import json
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote

from hub_server import answering

NAME = "Salesforce/wikitext"
CONFIG = "wikitext-2-raw-v1"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = {
    "train": ["", " = Of training = \n", "", " Learn @-@ by this . \n"],
    "validation": ["", " = Of validation = \n"],
    "test": ["", " = Of the test = \n", "", " Judge by this . \n"],
}


def files_of(column):
    """The data set's files, the rows of each split in a column of that name."""
    lines = ["configs:", f"- config_name: {CONFIG}", "  data_files:"]
    for split in ROWS:
        lines += [f"  - split: {split}", f"    path: {CONFIG}/{split}-*"]
    card = "\n".join(["---", *lines, "---", ""])
    return {"README.md": card.encode()} | {
        f"{CONFIG}/{split}-00000.jsonl": "".join(json.dumps({column: row}) + "\n" for row in rows).encode()
        for split, rows in ROWS.items()
    }


class Hub(BaseHTTPRequestHandler):
    """Answers what `datasets` asks; everything else is not there."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]

    def _say(self, status, data=b"{}", **headers):
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(data))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self):
        path = unquote(self.path.partition("?")[0])
        if path == "/":
            return self._say(200)
        if path.startswith(f"/datasets/{NAME}/resolve/"):
            name = path.removeprefix(f"/datasets/{NAME}/resolve/").partition("/")[2]
            if (data := self.files.get(name)) is None:
                return self._say(404, X_Error_Code="EntryNotFound")
            return self._say(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=COMMIT)
        if path.startswith(f"/api/datasets/{NAME}/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            return self._say(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode())
        if path.startswith(f"/api/datasets/{NAME}/tree/{COMMIT}"):
            folder = path.removeprefix(f"/api/datasets/{NAME}/tree/{COMMIT}").strip("/")
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
                if name.rpartition("/")[0] == folder
            ]
            if not folder and len(self.files) > 1:
                entries.append({"type": "directory", "path": CONFIG, "size": 0, "oid": "0" * 40})
            return self._say(200, json.dumps(entries).encode())
        return self._say(404)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_):
        pass


def wikitext_hub(files):
    """Run such a hub; its URL."""
    return answering(type("OurHub", (Hub,), {"files": files}))
