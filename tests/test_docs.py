"""The documents say what the code does: links, commands, tables, and the worked example."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from quantkit.cli.app import app
from quantkit.cli.convert import OPTIONS
from quantkit.contracts.registry import engines, find_method, methods, probes
from quantkit.conversion.check import prepare
from quantkit.recipe import CompareRecipe, load_recipe
from quantkit.sweep.compare import parse_variant

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
EXAMPLE = ROOT / "docs" / "add-a-method.md"
COMMANDS = typer.main.get_command(app)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def fences(text: str, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(text) if language in languages]


def commands(text: str) -> list[list[str]]:
    """The words of every command line in the page's bash blocks, without its environment."""
    lines = "".join(fences(text, "bash")).replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [words for words in split if words]


def rows(text: str) -> list[list[str]]:
    """Cells of every table row outside of code blocks."""
    plain = FENCE.sub("", text)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in plain.splitlines() if line[:1] == "|"]


def names_in(text: str, head: str) -> list[str]:
    """The backticked names in the first column of the first table whose first title is `head`."""
    found = rows(text)
    start = next(i for i, cells in enumerate(found) if cells[0] == head) + 2
    names = []
    for cells in found[start:]:
        if not (name := re.fullmatch(r"`([\w-]+)`", cells[0])):
            break
        names.append(name[1])
    return names


def section(text: str, title: str) -> str:
    return re.split(rf"^## {re.escape(title)}$", text, flags=re.MULTILINE)[1].split("\n## ")[0]


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists() or name_of(there) == "docs/perplexity-size.svg", target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_name_no_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?<![\w.])/(?:work|home|root|tmp|opt|usr|Users)/\S*", text)
    assert not re.findall(r"\b(?:pypi|files\.pythonhosted|download\.pytorch)\S*", text, flags=re.IGNORECASE)


def parse_command(words: list[str]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Parse `quantkit ...` as the command line would, without running it: its options, and those of its method."""
    group = COMMANDS.make_context("quantkit", list(words), resilient_parsing=True)
    name, command, rest = COMMANDS.resolve_command(group, words)
    if "--help" in rest:
        return name, {}, {}
    context = command.make_context(name, rest, parent=group)
    assert not context.args, words
    return name, context.params, context.meta.get(OPTIONS, {})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_parse(page: Path) -> None:
    if page == EXAMPLE and "row8" not in methods():
        pytest.skip("runs in test_the_worked_example_is_three_files, where row8 exists")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in commands(page.read_text(encoding="utf-8")):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE), words
        if words[0] != "quantkit":
            continue
        name, params, options = parse_command(words[1:])
        if name == "convert" and params:
            method = find_method(params["method"])
            method.parse_bits(params["bits"])
            method.parse_options(options)
        if name == "compare" and params["methods"]:
            for variant in map(parse_variant, params["methods"].split(",")):
                find_method(variant.method).parse_bits(variant.bits)
        if name == "run":
            assert (ROOT / params["recipe"]).is_file(), words


def test_a_wrong_command_would_be_found() -> None:
    with pytest.raises(Exception, match="--limits"):
        parse_command(["eval-ppl", "demo", "--limits", "4"])


@pytest.mark.parametrize(
    ("page", "head", "registered"),
    [("methods", "method", methods), ("engines", "engine", engines), ("probes", "probe", probes)],
)
def test_every_registered_name_has_a_row(page: str, head: str, registered: Any) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert sorted(names_in(text, head)) == sorted(registered())


@pytest.mark.parametrize("name", sorted(methods()))
def test_rows_of_methods_give_their_bits(name: str) -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    bits = next(cells[1] for cells in rows(text) if cells[0] == f"`{name}`" and len(cells) == 5)
    method = find_method(name)
    assert tuple(bits.replace("**", "").split(", ")) == method.bits
    assert f"**{method.default_bits}**" in bits


@pytest.mark.parametrize("name", sorted(methods()))
def test_option_rows_equal_the_code(name: str) -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    told = {
        cells[0].strip("`"): (yaml.safe_load(cells[1].strip("`")), cells[2])
        for cells in rows(section(text, name))
        if len(cells) == 3 and re.fullmatch(r"`\w+`", cells[0])
    }
    fields = find_method(name).Options.model_fields
    assert told == {option: (field.get_default(), field.description) for option, field in fields.items()}


def test_readme_table_lists_all_methods() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in names_in(text, "method"):
        cells = next(cells for cells in rows(text) if cells[0] == f"`{name}`")
        assert tuple(cells[1].split(", ")) == find_method(name).bits
    assert {"gptq", "awq", "nf4", "rtn", "ctranslate2", "gguf"} <= set(names_in(text, "method"))


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_recipes_can_be_used(path: Path, tiny_llama: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.model == "demo"
    if isinstance(recipe, CompareRecipe):
        for variant in recipe.variants:
            find_method(variant.method).parse_bits(variant.bits)
        return
    job = prepare(recipe.model_copy(update={"model": str(tiny_llama)}))
    assert job.recipe.bits is not None
    assert path.stem == recipe.method


def test_there_is_a_recipe_for_each_method() -> None:
    assert {path.stem for path in RECIPES} >= {"gptq", "awq", "nf4", "rtn", "ctranslate2", "gguf", "demo"}


def worked_example() -> dict[str, list[str]]:
    """The code blocks of docs/add-a-method.md by the file that they belong to."""
    parts = re.split(r"^## \d\. `(.*)`$", EXAMPLE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {path: fences(body, "python", "markdown") for path, body in zip(parts[::2], parts[1::2], strict=True)}


def write_worked_example(root: Path) -> None:
    """Change the three files in a copy of the repository, as the page says."""
    for path, blocks in worked_example().items():
        if path == "docs/methods.md":
            text = (root / path).read_text(encoding="utf-8")
            last = [line for line in text.split("\n\n")[2].splitlines() if line.startswith("| `")][-1]
            text = text.replace(last + "\n", last + "\n" + blocks[0], 1) + "\n" + blocks[1]
            (root / path).write_text(text, encoding="utf-8")
        else:
            assert not (root / path).exists()
            (root / path).write_text(blocks[0], encoding="utf-8")


def test_the_worked_example_is_three_files(tmp_path: Path) -> None:
    root = tmp_path / "clone"
    skip = shutil.ignore_patterns("__pycache__")
    for folder in ("quantkit", "docs", "recipes"):
        shutil.copytree(ROOT / folder, root / folder, ignore=skip)
    (root / "tests").mkdir()
    for name in ("README.md", "Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    (root / "examples").mkdir()
    for name in ("conftest.py", "tiny_llama.py", "test_docs.py"):
        shutil.copy(ROOT / "tests" / name, root / "tests" / name)
    assert list(worked_example()) == ["quantkit/methods/row8.py", "tests/test_row8.py", "docs/methods.md"]
    write_worked_example(root)
    wanted = "row8 or option_rows or rows_of_methods or every_registered or links or commands_parse"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "tests", "-k", wanted],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout
