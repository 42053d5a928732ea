"""A hub on this machine that has Salesforce/wikitext, as far as the package `datasets` asks for it."""

import hashlib
import json
from urllib.parse import unquote

from hub_server import Answering, in_threads

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


class Hub(Answering):
    """Answers what `datasets` asks; everything else is not there."""

    files: dict[str, bytes]

    def do_GET(self):  # noqa: N802
        path = unquote(self.path.partition("?")[0])
        if path == "/":
            return self._answer(200)
        if path.startswith(f"/datasets/{NAME}/resolve/"):
            name = path.removeprefix(f"/datasets/{NAME}/resolve/").partition("/")[2]
            if (data := self.files.get(name)) is None:
                return self._answer(404, headers={"X-Error-Code": "EntryNotFound"})
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            return self._answer(200, data, {"ETag": etag, "X-Repo-Commit": COMMIT})
        if path.startswith(f"/api/datasets/{NAME}/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            return self._answer(200, {"id": NAME, "sha": COMMIT, "siblings": siblings})
        if path.startswith(f"/api/datasets/{NAME}/tree/{COMMIT}"):
            folder = path.removeprefix(f"/api/datasets/{NAME}/tree/{COMMIT}").strip("/")
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
                if name.rpartition("/")[0] == folder
            ]
            if not folder and len(self.files) > 1:
                entries.append({"type": "directory", "path": CONFIG, "size": 0, "oid": "0" * 40})
            return self._answer(200, entries)
        return self._answer(404)

    do_HEAD = do_GET  # noqa: N815


def wikitext_hub(files):
    """Run such a hub; its URL."""
    return in_threads(type("OurHub", (Hub,), {"files": files}))
