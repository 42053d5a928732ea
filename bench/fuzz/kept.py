"""Damage to what quantkit keeps for later: unfinished work, reports, tables, baselines, scored positions."""

from __future__ import annotations

import json
import os

from bench.fuzz import judges
from bench.fuzz.bases import UNFINISHED, clean_figures, copied, judged
from bench.fuzz.case import Attack, Case, Change, Kind, json_or_raw
from bench.fuzz.mutations import Damage, json_text, raw_bytes


def lines_or_raw(damage: Damage, data: bytes) -> bytes:
    """A file of JSON lines, each with its checksum, with a changed line or with damaged bytes."""
    if damage.draw.random() < 0.3:
        return raw_bytes(damage, data)
    lines = data.splitlines(keepends=True)
    at = damage.draw.randrange(len(lines))
    kind = damage.draw.choice(("value", "value", "value", "value", "twice", "remove", "turned"))
    if kind == "value":
        text, _, checksum = lines[at].rpartition(b" ")
        text = json_text(damage, json.loads(text), ("block", "end", "crc32", "tensors", "state"))
        lines[at] = text + b" " + checksum
    elif kind == "twice":
        lines.insert(at, lines[at])
    elif kind == "remove":
        del lines[at]
    else:
        lines.reverse()
    damage.notes.append(f"line {at} {kind}")
    return b"".join(lines)


def unfinished(case: Case) -> Attack:
    """The folder of a conversion that was killed after its first block."""
    folder = copied(case.bases / "unfinished" / "out.partial", case.here / "out.partial")
    name = case.draw.choice(("work.json", "tensors.journal", "tensors.journal", "tensors.spool", ".owner", "more"))
    changes: dict[str, Change] = {"work.json": json_or_raw, "tensors.journal": lines_or_raw}
    path = folder / name
    case.say(name)
    victim = case.here / "victim"
    if name == ".owner" or (name != "more" and case.draw.random() < 0.15):
        victim.write_text("mine")
        kind = case.draw.choice(("link", "folder", "nothing", "bytes"))
        case.say(kind)
        path.unlink(missing_ok=True)
        if kind == "link":
            path.symlink_to(victim)
        elif kind == "folder":
            path.mkdir()
        elif kind == "bytes":
            path.write_bytes(case.draw.randbytes(50))
    elif name == "more":
        (folder / case.draw.choice(("quantkit.json", "config.json", "x.safetensors", "inner"))).write_bytes(b"{}")
        (folder / "link").symlink_to(folder)
    else:
        case.rewrite(path, changes.get(name, raw_bytes))
    arguments = ["convert", str(case.bases / "sources" / "llama"), "--out", "out", *UNFINISHED]
    sound = case.bases / "unfinished" / "whole"

    def judge() -> str:
        if victim.exists() and victim.read_text() != "mine":
            return "the target of a link was overwritten"
        return judges.same_files(sound, case.here / "out")

    return Attack(arguments, judge)


def compared(case: Case) -> Attack:
    """What an earlier comparison left: reports, artifacts, the table."""
    folder = copied(case.bases / "compared", case.here / "out")
    names = [
        path for path in sorted(folder.rglob("*.json")) if path.parent.name == "reports" or path.name == "quantkit.json"
    ]
    path = case.draw.choice(names * 3 + [path for path in sorted(folder.rglob("*")) if path.is_file()])
    case.rewrite(path, json_or_raw if path.suffix == ".json" else raw_bytes)
    case.say(str(path.relative_to(folder)))
    arguments = ["run", str(case.bases / "files" / "compare.json"), "--out", "out"]
    return Attack(arguments, lambda: judges.same_table(case.bases / "compared" / "table.json", folder / "table.json"))


def table(case: Case) -> Attack:
    """A table.json that is read back."""
    path = case.here / "table.json"
    path.write_bytes((case.bases / "compared" / "table.json").read_bytes())
    case.rewrite(path, json_or_raw)

    def call() -> None:
        from quantkit.report.table import join_tables, read_tables

        print(join_tables(read_tables(path)).to_markdown())

    return Attack(
        ["(read_tables)", str(path)], lambda: judges.table(case.bases / "compared" / "table.json", path), call
    )


def cached(what: str) -> Kind:
    """A file in quantkit's cache: of a baseline, or of an evaluation that was killed."""

    def make(case: Case) -> Attack:
        cache = copied(case.bases / what, case.here.parent / "cache")
        path = case.draw.choice(
            [path for path in sorted(cache.rglob("*")) if path.is_file() and path.suffix != ".lock"]
        )
        case.rewrite(path, json_or_raw if path.suffix == ".json" else raw_bytes)
        case.say(path.suffix)
        source = str(case.bases / "sources" / "llama")
        arguments = judged(case.bases / "artifacts" / "gptq", "--source", source, "--json", "report.json")
        clean = clean_figures(case.bases, "divergence")
        return Attack(arguments, lambda: judges.same_figures(case.here / "report.json", clean))

    return make


def output(case: Case) -> Attack:
    """What lies where the artifact or its work folder is to be."""
    draw, here = case.draw, case.here
    mine = here / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("mine")
    whole = copied(case.bases / "unfinished" / "whole", here / "whole")
    name = draw.choice(
        ("out", "out", "out", "out.partial", "out.replaced", "out.partial/.owner", "out.partial/work.json")
    )
    path = here / name
    path.parent.mkdir(exist_ok=True)
    kind = draw.choice(("folder", "artifact", "nothing", "circle", "file", "empty", "mine", "outside", "pipe"))
    case.say(f"{name} is {kind}")
    links = {
        "folder": mine,
        "artifact": whole,
        "nothing": here / "nothing",
        "circle": path,
        "outside": mine / "letter.txt",
    }
    if kind in links:
        path.symlink_to(links[kind])
    elif kind == "file":
        path.write_text("mine")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
        if kind == "mine":
            (path / "letter.txt").write_text("mine")
    arguments = ["convert", str(case.bases / "sources" / "llama"), "--out", "out", *UNFINISHED]
    if draw.random() < 0.5:
        arguments.append("--force")

    def judge() -> str:
        if (mine / "letter.txt").read_text() != "mine" or (kind == "mine" and not (path / "letter.txt").exists()):
            return "a file of the user's was changed"
        if not (whole / "quantkit.json").is_file():
            return "the target of a link was removed"
        return judges.same_files(case.bases / "unfinished" / "whole", here / "out")

    return Attack(arguments, judge)


KINDS: dict[str, Kind] = {
    "unfinished work": unfinished,
    "output folder": output,
    "kept reports": compared,
    "table.json": table,
    "baseline": cached("baseline"),
    "scored positions": cached("positions"),
}
