"""Who may import whom, by docs/contributing/architecture.md; imports for types may point up at what is a Protocol."""

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import quantkit

PACKAGE = Path(quantkit.__file__).parent
# From the ground up: a room imports only from those before it.
ROOMS = (
    *("errors", "system", "numerics"),
    *("records", "data", "checkpoints"),
    *("report", "models", "contracts"),
    *("formats", "calibration"),
    *("conversion", "engines", "evaluation", "serving"),
    *("methods", "publishing", "comparison"),
    *("cli", "__init__", "__main__"),
)
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


def trees():
    """The modules by names such as ``formats.gguf.writer``; a package's own file has the package's name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = ast.parse(
            path.read_text(encoding="utf-8")
        )
    return found


def imports(tree, known):
    """(module, name in it or "", node) of every import of quantkit; a submodule is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for full in (name.removeprefix("quantkit.") for name in names if name.split(".")[0] == "quantkit"):
            module, _, name = full.rpartition(".")
            yield (full, "", node) if full in known else (module or "__init__", name, node)


def upward(known):
    """Modules that import from a later room."""
    protocols = {
        (module, node.name)
        for module, tree in known.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.dump(base) for base in node.bases)
    }
    found = []
    for importer, tree in known.items():
        blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
        for_types = [inner for node in blocks if "TYPE_CHECKING" in ast.dump(node.test) for inner in ast.walk(node)]
        for module, name, node in imports(tree, known):
            below = ROOMS.index(module.split(".")[0]) <= ROOMS.index(importer.split(".")[0])
            excused = node in for_types and (module, name) in protocols
            itself = module == "__init__" and name in ("__version__", "quantkit")
            if not below and not excused and not itself:
                found.append(f"{importer} imports {module}")
    return found


def circle(known):
    graph = {
        importer: {module for module, _, _ in imports(tree, known) if module not in ("__init__", importer)}
        for importer, tree in known.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_import_points_down():
    known = trees()
    assert len(known) > 100
    assert upward(known) == []
    assert circle(known) == []
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names - {"__pycache__"} <= set(ROOMS)


def test_packages_hold_nothing_but_words_and_test_files_have_names_of_their_own():
    """An `__init__.py` is a docstring, or a format's or a method's own file: light paths load what they need."""
    allowed = {PACKAGE, *(PACKAGE / "formats").iterdir(), *(PACKAGE / "methods").iterdir()}
    for path in PACKAGE.rglob("__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert path.parent in allowed or len(body) == 1, path
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize(("text", "count"), [
    ("from quantkit.methods import rtn", 1),
    ("import quantkit.methods.rtn", 1),
    ("def f():\n    from quantkit.methods.rtn import Rounds", 1),
    (f"{FOR_TYPES}from quantkit.methods.rtn import METHOD", 1),
    (f"{FOR_TYPES}from quantkit.methods.rtn import Rounds", 0),  # a Protocol may be named for types
])  # fmt: skip
def test_a_wrong_import_is_found(text, count):
    later = "from quantkit.numerics.grid import x\nclass Rounds(Protocol):\n    pass\n"
    known = {"numerics.grid": ast.parse(text), "methods.rtn": ast.parse(later)}
    assert upward(known) == ["numerics.grid imports methods.rtn"] * count
    assert {"numerics.grid", "methods.rtn"} == set(circle(known))
