"""The documents say what the code does: links, paths, commands, tables, and the worked examples."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
import yaml
from test_rooms import ROOMS

from quantkit.cli.app import make_app
from quantkit.cli.convert import method_options
from quantkit.contracts.registry import engines, find_format_for, find_method, formats, methods
from quantkit.conversion.check import prepare
from quantkit.evaluation.probes import PROBES
from quantkit.records.recipe import CompareRecipe, ConvertRun, SweepRecipe, Variant, load_recipe

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "quantkit"
CHANGELOG = ROOT / "CHANGELOG.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", CHANGELOG, *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
METHOD_FILES = ("quantkit/methods/mse.py", "tests/methods/test_mse.py", "docs/methods.md")
FORMAT_FILES = ("quantkit/formats/row8.py", "tests/formats/test_row8.py", "docs/formats.md")


@dataclass(frozen=True)
class Example:
    """A worked example: its page, the `name` of what it adds to what is `registered`, and the files that it takes."""

    page: Path
    name: str
    registered: Callable[[], Collection[str]]
    files: tuple[str, ...]

    def blocks(self):
        """The code blocks of the page by the file that they belong to."""
        parts = re.split(r"^## \d\. `(.*)`$", self.page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        return {path: fences(body, "python", "markdown") for path, body in zip(parts[::2], parts[1::2], strict=True)}

    def write(self, root):
        """Make the files in a copy of the repository as the page says: rows and sections go to pages that are there."""
        for name, (block, *section) in self.blocks().items():
            path = root / name
            if name.endswith(".py"):
                assert not path.exists()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block, encoding="utf-8")
            else:
                text = path.read_text(encoding="utf-8")
                table = next(part for part in text.split("\n\n") if part.startswith("|"))
                path.write_text(
                    "\n".join([text.replace(table, f"{table}\n{block.strip()}", 1), *section]), encoding="utf-8"
                )


EXAMPLES = (
    Example(ROOT / "docs" / "add-a-method.md", "mse", methods, METHOD_FILES),
    Example(ROOT / "docs" / "add-a-format.md", "row8", formats, FORMAT_FILES),
)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def fences(text, *languages):
    return [body for language, body in FENCE.findall(text) if language in languages]


def commands(text):
    """The words of every command line in the page's bash blocks, without its environment."""
    lines = "".join(fences(text, "bash")).replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [words for words in split if words]


def rows(text):
    """Cells of every table row outside of code blocks."""
    plain = FENCE.sub("", text)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in plain.splitlines() if line[:1] == "|"]


def names_in(text, head):
    """The backticked names in the first column of the first table whose first title is `head`."""
    found = rows(text)
    start = next(i for i, cells in enumerate(found) if cells[0] == head) + 2
    names = []
    for cells in found[start:]:
        if not (name := re.fullmatch(r"`([\w-]+)`", cells[0])):
            break
        names.append(name[1])
    return names


def section(text, title):
    return re.split(rf"^## {re.escape(title)}$", text, flags=re.MULTILINE)[1].split("\n## ")[0]


def anchors(page):
    """GitHub's anchors of the headings."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_resolve_and_no_machine_is_named():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
            if target.startswith("https://"):
                continue
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists() or name_of(there) == "docs/perplexity-size.svg", (page, target)
            assert not anchor or anchor in anchors(there), (page, target)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"(?<![\w.])/(?:work|home|root|tmp|opt|usr|Users)/\S*", text), page
        assert not re.findall(r"(?i)\b(?:pypi|files\.pythonhosted|download\.pytorch)\S*", text), page


def test_paths_of_the_package_exist():
    """Those that begin with its name, and those that begin with a room's; not what was, nor what an example makes."""
    made = [name for example in EXAMPLES for name in example.files]
    wrong = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for path in re.findall(r"`((?:\w+/)+[\w.-]*)`", text) if page != CHANGELOG else ():
            room = (PACKAGE / path.split("/")[0]).is_dir()
            there = [folder / path for folder in (ROOT, *([PACKAGE] if room else []))]
            known = path.split("/")[0] in ("quantkit", "tests", "docs", "recipes", "examples", "bench") or room
            if known and "NAME" not in path and path not in made and not any(one.exists() for one in there):
                wrong.append(f"{name_of(page)}: {path}")
    assert not wrong


def parse_command(words):
    """Parse `quantkit ...` as the command line would, without running it: its options, and those of its method."""
    commands = typer.main.get_command(make_app(words))
    group = commands.make_context("quantkit", list(words), resilient_parsing=True)
    name, command, rest = commands.resolve_command(group, words)
    if "--help" in rest:
        return name, {}, {}
    context = command.make_context(name, rest, parent=group)
    assert not context.args, words
    options = method_options(words).take(context.params) if name == "convert" else {}
    return name, context.params, options


# The commands of a worked example are parsed in the copy of the repository where it is there.
RUNNABLE = [page for page in PAGES if all(e.name in e.registered() for e in EXAMPLES if e.page == page)]


def test_commands_parse(here):
    for name in ("model.gguf", "tokenizer-folder"):  # what some commands take and look for
        (here / name).touch()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in (words for page in RUNNABLE for words in commands(page.read_text(encoding="utf-8"))):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE), words
        if words[0] != "quantkit":
            continue
        name, params, options = parse_command(words[1:])
        if name == "convert" and params:
            method = find_method(params["method"])
            method.parse_bits(params["bits"])
            method.parse_options(options)
            find_format_for(method, params["format"])
        if name == "compare" and params["methods"]:
            for variant in map(Variant.model_validate, params["methods"].split(",")):
                find_method(variant.method).parse_bits(variant.bits)
        if name == "run":
            assert (ROOT / params["recipe"]).is_file(), words

    with pytest.raises(Exception, match="--limits"):
        parse_command(["eval-ppl", "demo", "--limits", "4"])


@pytest.mark.parametrize(("page", "registered"), [
    ("methods", methods()), ("formats", formats()), ("engines", engines()), ("probes", PROBES),
])  # fmt: skip
def test_every_registered_name_has_a_row(page, registered):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert sorted(names_in(text, page.removesuffix("s"))) == sorted(registered)


def test_rows_of_methods_and_option_rows_equal_the_code():
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for name, method in methods().items():
        bits = next(cells[1] for cells in rows(text) if cells[0] == f"`{name}`" and len(cells) == 5)
        assert tuple(bits.replace("**", "").split(", ")) == method.bits
        assert f"**{method.default_bits}**" in bits
        told = {
            cells[0].strip("`"): (yaml.safe_load(cells[1].strip("`")), cells[2])
            for cells in rows(section(text, name))
            if len(cells) == 3 and re.fullmatch(r"`\w+`", cells[0])
        }
        fields = method.Options.model_fields
        assert told == {option: (field.get_default(), field.description) for option, field in fields.items()}, name
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = {cells[0].strip("`"): cells[1] for cells in rows(readme)}
    for name in names_in(readme, "method"):
        assert tuple(first[name].split(", ")) == methods()[name].bits


def test_recipes_can_be_used(tiny_llama):
    for path in RECIPES:
        recipe = load_recipe(path)
        assert (recipe.models[0] if isinstance(recipe, SweepRecipe) else recipe).model == "demo"
        assert recipe.out is not None
        for variant in recipe.variants if isinstance(recipe, CompareRecipe | SweepRecipe) else (recipe,):
            method = find_method(variant.method)
            assert method.parse_bits(variant.bits) == variant.bits
            method.parse_options(variant.options)
        if isinstance(recipe, ConvertRun):
            assert prepare(recipe.model_copy(update={"model": str(tiny_llama)})).recipe.bits == recipe.bits
            assert path.stem == recipe.method
    assert len(RECIPES) > 7


def test_the_page_of_the_rooms_has_their_order():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    start = next(i for i, cells in enumerate(rows(text)) if cells[:2] == ["floor", "room"]) + 2
    told = [(int(cells[0]), cells[1].strip("`")) for cells in rows(text)[start:] if cells[0].isdigit()]
    assert [room for _, room in told] == [room for room in ROOMS if not room.startswith("__")]
    assert [floor for floor, _ in told] == sorted(floor for floor, _ in told)


@pytest.mark.slow
def test_worked_examples_take_nothing_but_their_files(tmp_path):
    root = tmp_path / "clone"
    skip = shutil.ignore_patterns("__pycache__")
    for folder in ("quantkit", "docs", "recipes", "examples"):
        shutil.copytree(ROOT / folder, root / folder, ignore=skip)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, root / path.name)
    helpers = [name_of(path) for path in (ROOT / "tests").glob("*.py") if not path.name.startswith("test_")]
    tests = ("tests/test_docs.py", "tests/test_rooms.py", "tests/contracts/test_registry.py")
    for name in (*helpers, *tests, "tests/formats/gguf_architectures.json", "bench/README.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for example in EXAMPLES:
        assert tuple(example.blocks()) == example.files
        example.write(root)

    files = [name for example in EXAMPLES for name in example.files if name.endswith(".py")]
    for command in (["check"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, "--no-cache", *files], cwd=root, check=True)
    names = " or ".join(example.name for example in EXAMPLES)
    chosen = f"{names} or rooms or every_registered or option_rows or rows_of or links or paths or parse"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "tests", "-k", f"({chosen}) and not worked"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("page", ["engines", "api"])
def test_a_page_that_is_made_is_up_to_date(page):
    made = runpy.run_path(str(ROOT / "docs" / f"make_{page}.py"))["page"]()
    assert (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") == made, "make api"
