"""The documentation agrees with the code: links, paths, commands, tables, generated pages and the worked examples."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from test_rooms import ROOMS

from quantkit.cli.app import make_app
from quantkit.cli.convert import method_options
from quantkit.contracts.registry import engines, find_format_for, find_method, formats, methods
from quantkit.conversion.check import prepare
from quantkit.errors import DISTRIBUTION
from quantkit.evaluation.probes import PROBES
from quantkit.records.recipe import CompareRecipe, ConvertRun, SweepRecipe, Variant, load_recipe

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "quantkit"
DOCS = ROOT / "docs"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *sorted(DOCS.rglob("*.md"))]
OF_BENCH = [ROOT / "bench" / "README.md", *sorted((ROOT / "bench" / "results").glob("*.md"))]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
METHOD_FILES = (
    "quantkit/methods/mse.py",
    "tests/methods/test_mse.py",
    "docs/methods/index.md",
    "docs/methods/mse.md",
)
FORMAT_FILES = ("quantkit/formats/row8.py", "tests/formats/test_row8.py", "docs/formats.md")
SHARED_OPTIONS = ("bits-by-layer", "calibration")  # pages of docs/methods with options that several methods have
GENERATED = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@dataclass(frozen=True)
class Example:
    """A worked example: its page, the `kind` and `name` of what it adds to the `registered` ones, and its files."""

    page: Path
    kind: str
    name: str
    registered: Callable[[], Collection[str]]
    files: tuple[str, ...]

    def blocks(self):
        """The code blocks of the page by the file that they belong to."""
        parts = re.split(r"^## \d\. `(.*)`$", self.page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        return {path: fences(body, "python", "markdown") for path, body in zip(parts[::2], parts[1::2], strict=True)}

    def write(self, root):
        """Write the files into a copy of the repository; a row goes to the table of a page that exists."""
        for name, blocks in self.blocks().items():
            [block], path = blocks, root / name
            if path.exists():
                text = path.read_text(encoding="utf-8")
                table = re.search(rf"^\| {self.kind} \|.*\n(?:\|.*\n)+", text, flags=re.MULTILINE)
                block = f"{text[: table.end()]}{block}{text[table.end() :]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block, encoding="utf-8")


EXAMPLES = (
    Example(DOCS / "contributing" / "add-a-method.md", "method", "mse", methods, METHOD_FILES),
    Example(DOCS / "contributing" / "add-a-format.md", "format", "row8", formats, FORMAT_FILES),
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
    """Cells of every table row outside of code blocks; a cell may hold an escaped bar."""
    lines = FENCE.sub("", text).splitlines()
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines if line[:1] == "|"
    ]


def tables(text, head):
    """The tables whose first title is `head`: for each one its rows as mappings from titles to cells."""
    found, titles = [], None
    for line in [*FENCE.sub("", text).splitlines(), ""]:
        cells = rows(line)
        if not cells:
            titles = None
        elif titles is None:
            titles = cells[0]
            if titles[0] == head:
                found.append([])
        elif titles[0] == head and not line.startswith("|-"):
            found[-1].append(dict(zip(titles, cells[0], strict=True)))
    return found


def name_in(cell):
    """The name in a cell such as `gptq` or [`gptq`](gptq.md)."""
    return re.match(r"\[?`(?:--)?([\w-]+)", cell)[1]


def options_on(page):
    """The rows of the options on a page, by the option's name: its default, as text, and its description."""
    text = (DOCS / "methods" / f"{page}.md").read_text(encoding="utf-8")
    found = {}
    for row in (row for table in tables(text, "option") for row in table if "default" in row):
        default, meaning = row["default"].strip("`"), row["meaning"].replace("\\|", "|")
        found[name_in(row["option"]).replace("-", "_")] = default, meaning
    return found


def anchors(page):
    """GitHub's anchors of the headings."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_resolve_and_no_machine_is_named():
    for page in (*PAGES, *OF_BENCH):
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
            if target.startswith("https://"):
                continue
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), (page, target)
            assert not anchor or anchor in anchors(there), (page, target)
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"(?<![\w.])/(?:work|home|root|tmp|opt|usr|Users)/\S*", text), page
        assert not re.findall(r"(?i)\b(?:pypi|files\.pythonhosted|download\.pytorch)\S*", text), page


def test_the_index_lists_every_decision():
    linked = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (DOCS / "decisions" / "index.md").read_text(encoding="utf-8"))
    assert linked == sorted(path.name for path in (DOCS / "decisions").glob("0*.md"))


def test_paths_of_the_package_exist():
    """Those that begin with its name, and those that begin with a room's; not what an example makes."""
    made = [name for example in EXAMPLES for name in example.files]
    wrong = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for path in re.findall(r"`((?:\w+/)+[\w.-]*)`", text):
            room = (PACKAGE / path.split("/")[0]).is_dir()
            there = [folder / path for folder in (ROOT, *([PACKAGE] if room else []))]
            known = path.split("/")[0] in ("quantkit", "tests", "docs", "recipes", "examples", "bench") or room
            if known and "NAME" not in path and path not in made and not any(one.exists() for one in there):
                wrong.append(f"{name_of(page)}: {path}")
    assert not wrong


def files_with(*suffixes):
    """The repository's own files that mention pages or packages."""
    folders = ("quantkit", "bench", "recipes", "examples", "docs")
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    return [path for path in sorted(paths) if path.is_file() and (path.suffix in suffixes or path.name == "Makefile")]


def test_pages_that_the_code_names_exist():
    wrong = []
    for path in files_with(".py", ".yaml", ".cmake", ".toml", ".html", ".js", ".c"):
        text = re.sub(r"https?://\S+", "", path.read_text(encoding="utf-8"))
        for page in re.findall(r"\bdocs/[\w/.-]+\.md\b", text):
            if not (ROOT / page).is_file() and page not in ("docs/page.md", *METHOD_FILES):
                wrong.append(f"{name_of(path)}: {page}")
    assert not wrong


def test_pip_lines_name_the_distribution():
    """`pip install quantkit` would install another project."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["name"] == DISTRIBUTION
    bare = re.compile(r"pip install\b[^`\n]*[\s'\"]quantkit(?![\w./-])|\bquantkit\[[a-z]")
    for path in files_with(".py", ".md", ".yaml", ".toml", ".html"):
        found = [line for line in path.read_text(encoding="utf-8").splitlines() if bare.search(line)]
        assert not found, path
    assert bare.search("pip install -c constraints.txt 'quantkit[all]'")
    assert bare.search("pip install quantkit")
    assert not bare.search(f"pip install '{DISTRIBUTION}[all]'")


def parse_command(words):
    """Parse `quantkit ...` as the command line would, without running it: its options, and those of its method."""
    if words[0].startswith("-"):
        return None, {}, {}
    commands = typer.main.get_command(make_app(words))
    group = commands.make_context("quantkit", list(words), resilient_parsing=True)
    name, command, rest = commands.resolve_command(group, words)
    if "--help" in rest:
        return name, {}, {}
    context = command.make_context(name, rest, parent=group)
    assert not context.args, words
    options = method_options(words).take(context.params) if name == "convert" else {}
    return name, context.params, options


def check_convert(params, options):
    method = find_method(params["method"])
    method.parse_bits(params["bits"])
    method.parse_options(options)
    find_format_for(method, params["format"])


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
            check_convert(params, options)
        if name == "compare" and params["methods"]:
            for variant in map(Variant.model_validate, params["methods"].split(",")):
                find_method(variant.method).parse_bits(variant.bits)
        if name == "run":
            assert (ROOT / params["recipe"]).is_file(), words

    with pytest.raises(Exception, match="--limits"):
        parse_command(["eval-ppl", "demo", "--limits", "4"])


def test_inline_commands_of_the_readme_parse():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in re.findall(r"`(--method [^`]*)`", text):
        check_convert(*parse_command(["convert", "demo", *shlex.split(line)])[1:])


@pytest.mark.parametrize(("page", "head", "registered"), [
    ("methods/index", "method", methods()), ("formats", "format", formats()), ("engines", "engine", engines()),
    ("evaluating/index", "probe", PROBES),
])  # fmt: skip
def test_every_registered_name_has_a_row(page, head, registered):
    table, *_ = tables((DOCS / f"{page}.md").read_text(encoding="utf-8"), head)
    names = [name_in(row[head]) for row in table if row[head]]  # a row without a name continues the one above
    assert sorted(names) == sorted(registered)


def shown(default):
    if default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def test_rows_of_methods_and_option_rows_equal_the_code():
    table, *_ = tables((DOCS / "methods" / "index.md").read_text(encoding="utf-8"), "method")
    title = next(title for title in table[0] if title.startswith("bits"))
    bits = {name_in(row["method"]): row[title] for row in table}
    shared = {}
    for page in SHARED_OPTIONS:
        shared |= options_on(page)
    for name, method in methods().items():
        assert f"**{method.default_bits}**" in bits[name]
        assert tuple(re.sub(r"[*`]", "", bits[name]).split(", ")) == method.bits
        fields = method.Options.model_fields
        defaults = {option: field.get_default(call_default_factory=True) for option, field in fields.items()}
        real = {option: (shown(defaults[option]), field.description) for option, field in fields.items()}
        written = options_on(name)
        elsewhere = {option: row for option, row in shared.items() if option in real and option not in written}
        assert written | elsewhere == real, name


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
    text = (DOCS / "contributing" / "architecture.md").read_text(encoding="utf-8")
    start = next(i for i, cells in enumerate(rows(text)) if cells[:2] == ["floor", "room"]) + 2
    told = [(int(cells[0]), cells[1].strip("`")) for cells in rows(text)[start:] if cells[0].isdigit()]
    assert [room for _, room in told] == [room for room in ROOMS if not room.startswith("__")]
    assert [floor for floor, _ in told] == sorted(floor for floor, _ in told)


@pytest.mark.slow
def test_worked_examples_take_nothing_but_their_files(tmp_path):
    root = tmp_path / "clone"
    skip = shutil.ignore_patterns("__pycache__", "*.json", "*.safetensors")
    for folder in ("quantkit", "docs", "recipes", "examples", "bench", "tests"):
        shutil.copytree(ROOT / folder, root / folder, ignore=skip)
    for path in (*ROOT.iterdir(), *(ROOT / "quantkit").rglob("*.json"), *(ROOT / "tests").rglob("*.json")):
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, root / path.relative_to(ROOT))
    for example in EXAMPLES:
        assert tuple(example.blocks()) == example.files
        example.write(root)

    files = [name for example in EXAMPLES for name in example.files if name.endswith(".py")]
    for command in (["check"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, "--no-cache", *files], cwd=root, check=True)
    tests = [name for name in files if name.startswith("tests/")]
    tests += ["tests/test_docs.py", "tests/test_rooms.py", "tests/contracts/test_registry.py"]
    options = ["-p", "no:cacheprovider", "-q", "-m", "not slow", "-k", "not up_to_date"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("page", GENERATED)
def test_a_generated_page_is_up_to_date(page):
    assert (DOCS / f"{page}.md").read_text(encoding="utf-8") == GENERATED[page](), "run: make docs-generate"


def test_generated_tables_of_options_are_up_to_date():
    for path, text in runpy.run_path(str(DOCS / "make_options.py"))["pages"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}; run: make docs-generate"


@pytest.mark.slow
def test_the_site_builds_and_needs_no_network(tmp_path):
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "doctrees"), ".", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for path in (tmp_path / "site").rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=.(?:https?:)?//", text), path
    for path in (tmp_path / "site").rglob("*.css"):
        assert not re.findall(r"(?:@import|url\([\"']?)\s*[\"']?https?:", path.read_text(encoding="utf-8")), path
