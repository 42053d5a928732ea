"""The rooms of the house: who may import whom.

The order is that of docs/architecture.md. Every import counts, also those inside functions and under TYPE_CHECKING; the
latter may point at a later room where all that is imported is a Protocol.
"""

import ast
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import quantkit

PACKAGE = Path(quantkit.__file__).parent
# From the ground up: a room imports only from those before it.
ROOMS = (
    *("errors", "untrusted", "progress", "numerics"),
    *("recipe", "system", "data"),
    *("artifact", "report", "checkpoints"),
    *("models", "contracts"),
    *("formats", "calibration", "probes"),
    *("conversion", "engines", "evaluation"),
    *("methods", "serving", "publishing", "sweep"),
    *("cli", "__init__", "__main__"),
)


@dataclass(frozen=True)
class Import:
    """`module` of quantkit, and `names` of it, imported by `importer`, both dotted; `line` of the importer's file."""

    importer: str
    module: str
    names: tuple[str, ...]
    line: int
    for_types: bool


def dotted(path: Path, package: Path) -> str:
    """Such as ``formats.gguf.writer``; a package's own file has the package's name."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports_of(path: Path, package: Path, modules: set[str]) -> list[Import]:
    """All imports of quantkit in a file; a submodule that is imported by name counts as the module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {id(inner) for node in ast.walk(tree) if is_type_checking(node) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            named = [(node.module or "", tuple(alias.name for alias in node.names))]
        elif isinstance(node, ast.Import):
            named = [(alias.name, ()) for alias in node.names]
        else:
            continue
        for module, names in named:
            if module.split(".")[0] != "quantkit":
                continue
            inside = module.partition(".")[2]
            submodules = [name for name in names if ".".join(filter(None, (inside, name))) in modules]
            others = tuple(name for name in names if name not in submodules)
            for name in submodules:
                target = ".".join(filter(None, (inside, name)))
                found.append(Import(dotted(path, package), target, (), node.lineno, id(node) in for_types))
            if others or not names:
                target = inside or "__init__"
                found.append(Import(dotted(path, package), target, others, node.lineno, id(node) in for_types))
    return found


def python_files(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*.py") if "__pycache__" not in path.parts)


@cache
def all_imports(package: Path) -> list[Import]:
    files = python_files(package)
    modules = {dotted(path, package) for path in files}
    return [one for path in files for one in imports_of(path, package, modules)]


def protocols(package: Path) -> set[tuple[str, str]]:
    """(module, name) of every Protocol."""
    return {
        (dotted(path, package), node.name)
        for path in python_files(package)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.dump(base) for base in node.bases)
    }


def floor(module: str, rooms: tuple[str, ...] = ROOMS) -> int:
    return rooms.index(module.split(".")[0])


def upward(package: Path) -> list[str]:
    """Imports from a later room, in words."""
    known = protocols(package)
    lines = []
    for one in all_imports(package):
        # The version, which is set before anything is imported, and the package itself are the ground, too.
        if one.module == "__init__" and set(one.names) <= {"__version__"}:
            continue
        excused = one.for_types and one.names and all((one.module, name) in known for name in one.names)
        if floor(one.module) > floor(one.importer) and not excused:
            lines.append(f"{one.importer}:{one.line} imports {one.module} ({', '.join(one.names)})")
    return lines


def circles(package: Path) -> list[list[str]]:
    """Circles between files: for each, the modules that it goes through."""
    graph: dict[str, set[str]] = {}
    for one in all_imports(package):
        if one.module not in ("__init__", one.importer):
            graph.setdefault(one.importer, set()).add(one.module)
    done: set[str] = set()
    found: list[list[str]] = []

    def visit(module: str, way: list[str]) -> None:
        if module in way:
            found.append([*way[way.index(module) :], module])
            return
        if module in done:
            return
        for other in sorted(graph.get(module, ())):
            visit(other, [*way, module])
        done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def strays(package: Path) -> list[str]:
    """What lies at the top and is no room."""
    names = [path.stem for path in package.iterdir() if path.suffix == ".py" or path.is_dir()]
    return sorted(name for name in names if name not in ROOMS and name != "__pycache__")


def test_every_import_points_down() -> None:
    assert upward(PACKAGE) == []
    assert circles(PACKAGE) == []


def test_the_top_holds_rooms_only() -> None:
    assert strays(PACKAGE) == []


def test_packages_hold_nothing_but_words_or_a_record() -> None:
    """An `__init__.py` is a docstring, or a format's or a method's own file: light paths load what they need."""
    allowed = {PACKAGE, *(PACKAGE / "formats").iterdir(), *(PACKAGE / "methods").iterdir()}
    for path in PACKAGE.rglob("__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert path.parent in allowed or len(body) == 1, path


def house(folder: Path, files: dict[str, str]) -> Path:
    """A small house of these files, each room a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from quantkit.methods.rtn import METHOD", 1),
        ("from quantkit.methods import rtn", 1),
        ("import quantkit.methods.rtn", 1),
        ("def f():\n    from quantkit.methods.rtn import METHOD", 1),
        (f"{FOR_TYPES}from quantkit.methods.rtn import Rounds, METHOD", 1),
        ("from quantkit.methods.rtn import Rounds", 1),
        (f"{FOR_TYPES}from quantkit.methods.rtn import Rounds", 0),  # a Protocol may be named for types
    ],
)
def test_an_import_from_a_later_room_is_found(text: str, count: int, tmp_path: Path) -> None:
    later = "from typing import Protocol\nclass Rounds(Protocol):\n    pass\nMETHOD = 1\n"
    found = upward(house(tmp_path, {"numerics/grid.py": text, "methods/rtn.py": later}))
    assert ["numerics.grid" in line for line in found] == [True] * count


@pytest.mark.parametrize("inner", ["{}", "def f():\n    {}", FOR_TYPES + "{}"])
def test_a_circle_is_found(inner: str, tmp_path: Path) -> None:
    files = {
        "numerics/a.py": "from quantkit.numerics.b import x",
        "numerics/b.py": "from quantkit.numerics import c",
        "numerics/c.py": inner.format("from quantkit.numerics.a import y"),
    }
    assert circles(house(tmp_path, files)) == [["numerics.a", "numerics.b", "numerics.c", "numerics.a"]]


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest imports them by their names alone."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]
