import base64
import gzip
import json
import re
import shlex
import tomllib
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up_reports import diverging, report, sheet
from test_docs import parse_command
from test_hostile_names import NAME
from tiny_models import quantkit, succeeds

import quantkit as package
from quantkit.records.artifact import MANIFEST, Artifact, Manifest, SourceEntry, WeightError
from quantkit.records.recipe import CalibrationSpec, ConvertRecipe, load_recipe
from quantkit.records.report import ModelEntry
from quantkit.report import page as page_module
from quantkit.report.card import convert_command
from quantkit.report.page import WITHOUT_SUMS, histogram, page
from quantkit.report.plot import points_of
from quantkit.report.table import COLOURS, Table, join_tables, read_tables

VOID = {"meta", "br"}
RECIPES = [
    ConvertRecipe(model="demo", method="gptq", bits="4"),
    ConvertRecipe(model="org/name", method="gptq", bits="3", options={"group_size": 64, "sym": False}, format="awq",
                  revision="abc", seed=7, calibration=CalibrationSpec(sequences=8, text="-a b.txt")),
    ConvertRecipe(model="-x $(touch y)", method="gguf", bits="auto", options={"target_size": "90MB", "imatrix": True}),
    ConvertRecipe(model="demo", method="gguf", bits="Q4_K_M", options={"tensor_type": {"attn_v": "Q8_0"}},
                  adapters=("one", "it's two")),
]  # fmt: skip


class Reader(HTMLParser):
    """The elements of a page with their attributes and texts; an element that is not ended where it should be fails."""

    def __init__(self, content):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


def rows(content, class_):
    inside = content.partition(f'<table class="{class_}"')[2].partition("</table>")[0]
    lines = re.findall(r"<tr>(.*?)</tr>", inside, re.DOTALL)
    return [[re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)] for line in lines]


def saved(content, name):
    target = re.search(rf'download="{name}\.gz" href="data:application/gzip;base64,([^"]*)"', content)
    return gzip.decompress(base64.b64decode(target[1])).decode()


def answer(content):
    """What the page says first of each model."""
    paragraphs = re.findall(r'<p class="answer">(.*?)</p>', content, re.DOTALL)
    return " ".join(" ".join(unescape(re.sub(r"<[^>]*>", "", paragraph)).split()) for paragraph in paragraphs)


def data_of(content):
    return json.loads(next(words for tag, words in Reader(content).texts if tag == "script"))


@pytest.fixture(scope="module")
def two():
    return sheet(2, 4)


@pytest.fixture(scope="module")
def content(two):
    return page(two)


def test_a_page_is_whole_and_loads_nothing(content):
    reader = Reader(content)
    names = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(names) == len(set(names))
    for name, attributes in reader.elements:
        assert not set(attributes) & {"src", "style", "srcset", "action"}, name
        assert not any(key.startswith("on") for key in attributes)
        target = attributes.get("href")
        if target is not None:
            assert target.startswith("data:application/gzip;base64,") or target[1:] in names, target
    assert not [part for part in ("http:", "https:", "url(", "@import") if part in content]
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {name for name, _ in reader.elements}
    # Were a text not escaped, the page's policy would run no script but its own and load nothing.
    [policy] = [a["content"] for name, a in reader.elements if name == "meta" and "http-equiv" in a]
    own = dict(reader.texts)  # the last of each kind
    for name in ("style", "script"):
        assert f"{name}-src 'sha256-{base64.b64encode(sha256(own[name].encode()).digest()).decode()}';" in policy
    assert policy.startswith("default-src 'none'; ")


def test_the_tables_say_what_the_sheet_says(two, content):
    head, *lines = rows(content, "figures")
    model = two.models[0]
    measures = two.rows(model)
    assert head == ["model", "variant", *(row.title for row in measures)]
    for i, line in enumerate(lines[:4]):
        assert line == [model, two.columns[i], *(row.cells[i] for row in measures)]
    assert len(lines) == 8
    # Bold is what the paired error says, neither more nor less.
    marked = [row.cells[row.best] for name in two.models for row in two.rows(name) if row.best is not None]
    assert len(marked) >= 6
    assert sorted(re.findall(r"<td data-v=[^>]*><b>([^<]*)</b>", content)) == sorted(marked)
    # What is saved is what the table writes.
    assert saved(content, "table.json") == two.to_json()
    assert saved(content, "table.csv") == two.to_csv()
    assert page(two) == content  # the same bytes each time


def test_a_page_that_is_too_large_leaves_the_sums_out(content, two, tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "MOST", len(content.encode()) - 1)
    smaller = page(two)
    assert WITHOUT_SUMS in unescape(smaller)
    path = tmp_path / "table.json"
    path.write_text(saved(smaller, "table.json"))
    reports = [report for _, table in read_tables(path) for report in table.reports]
    assert len(reports) == 8
    assert not any(m.sums for one in reports for m in one.measurements)
    assert saved(smaller, "table.csv") == two.to_csv()


@pytest.mark.parametrize(
    "name", [NAME, "</script><script>alert(1)</script>", "\" on='x' {{ 7*7 }} {% x \u2028b\u202ec"]
)
def test_a_text_of_others_is_text_in_the_page(name, content):
    made = hostile(name)
    reader = Reader(made)
    kinds = {tag for tag, _ in Reader(content).elements} | {"pre", "code"}
    assert {tag for tag, _ in reader.elements} <= kinds
    assert sum(tag == "script" for tag, _ in reader.elements) == made.count("</script") == 2
    assert not any(key.startswith("on") for _, attributes in reader.elements for key in attributes)
    data = data_of(made)
    visible = name.replace("\u2028", " ").replace("\x1b", "\\x1b").replace("\u202e", "\\x202e")
    visible = " ".join(visible.split())
    assert [point["label"] for point in data["points"]] == [f"{visible}{i}" for i in range(3)]
    shown = [" ".join(words.split()) for tag, words in reader.texts if tag not in ("script", "style")]
    for place in (f"{visible}: quantization results", f"{visible}1", visible):
        assert place in shown
    assert sum(visible in words for words in shown) > 20
    assert not {"\x1b", "\u202e", "\u2028"} & set(made)


def copies(*values):
    """Copies of (label, bytes, KLD, ms/token), and the source."""
    source = report("bfloat16", None, 20.0, 3e6, {1: 50.0})
    reports = [diverging(source, 0.001)]
    for i, (label, size, kld, speed) in enumerate(values):
        one = report(label, "gptq", 21.0, size, {1: speed})
        measured = [m.model_copy(update={"n": 9}) if m.name.startswith("ms_") else m for m in one.measurements]
        reports.append(diverging(one.model_copy(update={"measurements": tuple(measured)}), kld, 8, i))
    return join_tables([("here", Table(tuple(reports)))])


def test_the_first_sentence_names_what_was_asked_for():
    made = copies(("small", 0.5e6, 0.5, 30.0), ("middle", 0.9e6, 0.05, 20.0), ("large", 2e6, 0.002, 40.0))
    words = answer(page(made))
    assert words.startswith("Of tiny: the smallest copy with a KLD of at most 0.1 is middle (0.9 MB, KLD 0.0")
    # A third of float16: 1,000,000 weights in 16 bits have 2 MB.
    assert "The best of at most 0.7 MB (a third of float16) is small (0.5 MB, KLD 0." in words
    assert words.endswith("The fastest is middle (20 ms/token @ 1 thread).")
    # And what is to be said against it.
    assert "± 0.0125), but its KLD is above 0.1. The fastest" in words
    poor = made.reports[1].model_copy(update={"measurements": tuple(
        m.model_copy(update={"value": 40.0}) if m.name == "perplexity" else m for m in made.reports[1].measurements
    )})  # fmt: skip
    words = answer(page(join_tables([(None, Table((made.reports[0], poor)))])))
    assert "but its KLD is above 0.1 and its perplexity is 2.0 times the source's." in words
    words = answer(page(made, max_kld=0.0001, max_bytes=1e5))
    assert "no copy has a KLD of at most 0.0001; the nearest is large" in words
    assert "No copy has at most 0.1 MB." in words

    made = copies(("one", 0.5e6, 0.05, 20.0), ("two", 0.6e6, 0.05, 20.3))
    words = answer(page(made, max_kld=0.0505, max_bytes=1e6))
    assert ", with the limit inside its error." in words
    assert words.count("though not beyond the error of the difference") == 2
    nothing = join_tables([(None, Table((report("bfloat16", None, 20.0, 2e6),)))])
    assert answer(page(nothing)) == "No copy of tiny was measured."


def test_the_worst_windows_are_named_by_their_tokens(two, content):
    assert re.findall(r"v-([\d.]+)", histogram([0.0, 0.5, 0.5, 1.0])["bars"]) == ["33", "66", "33"]
    kld = two.variants(two.models[0])[1].find("kld")
    means = [total / 255 for total in kld.sums]
    worst = max(range(4), key=lambda i: means[i])
    tokens = f"(tokens {worst * 512:,} to {worst * 512 + 511:,})"
    assert f"Worst windows: {worst + 1} {tokens}: {means[worst]:.4f};" in content


def test_the_picture_has_every_figure_with_its_error(two, content):
    data = data_of(content)
    assert [title for title, _ in data["upwards"]] == ["perplexity", "KLD from source"]
    for title in (["file size", "MB"], ["ms/token @ 2 threads", "ms"], ["peak memory", "MB"]):
        assert title in data["across"]
    point = data["points"][1]
    one = two.variants(two.models[0])[1]
    kld, size = one.find("kld"), one.find("weight_bytes")
    assert point["values"]["KLD from source"] == [kld.value, kld.stderr]
    assert point["values"]["file size"] == [pytest.approx(size.value / 1e6), None]
    assert data["noise"] == dict.fromkeys(two.models, 0.0006)
    # Colours are those of the other picture, in the same order.
    assert "".join(f"--c{i}: {colour}; " for i, colour in enumerate(COLOURS)) in content
    one = join_tables([(None, Table(tuple(two.variants(two.models[0]))))])
    at = [data_of(page(one))["methods"].index(point.method) for point in points_of(one, one.models[0]) if point.method]
    assert [point.colour for point in points_of(one, one.models[0]) if point.method] == [COLOURS[i] for i in at]


def test_the_command_of_a_recipe_is_read_back_as_the_recipe():
    for recipe in RECIPES:
        words = shlex.split(convert_command(recipe, "--out"))
        name, params, options = parse_command(words[1:])
        assert (words[0], name, str(params["folder"])) == ("quantkit", "convert", "--out")
        told = {
            "model": params["model"].removeprefix("./"),
            **{key: params[key] for key in ("method", "bits", "format", "seed", "revision")},
            "adapters": tuple(params["adapter"] or ()),
            "calibration": {key: params[f"calibration_{key}"] for key in CalibrationSpec.model_fields},
            "options": options,
        }
        assert ConvertRecipe.model_validate(told) == recipe


@pytest.fixture(scope="module")
def comparison(tmp_path_factory, one_block):
    out = tmp_path_factory.mktemp("page") / "comparison"
    more = ("--n-ctx", 32, "--limit", 4, "--threads", 1, "--calibration-sequences", 4, "--calibration-length", 32)
    succeeds("compare", one_block, "--methods", "rtn:4,gguf:Q8_0", "--out", out, *more)
    return out


def test_a_comparison_becomes_a_page(comparison, tmp_path):
    path = tmp_path / "page.html"
    done = succeeds("report", comparison, "--out", path, "--max-kld", 5, "--max-size", "1MB", "--json", tmp_path / "j")
    assert done.out.startswith(f"{path}: 1 model, ")
    made = path.read_text(encoding="utf-8")
    Reader(made)
    assert (tmp_path / "j").read_text() == saved(made, "table.json")
    assert "The best of at most 1.0 MB is" in answer(made)
    shown = [words for tag, words in Reader(made).texts if tag == "code"]
    folder = comparison / "artifacts" / "gguf-Q8_0"
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_text())
    command = f"quantkit convert {manifest.recipe.model} --method gguf --bits Q8_0 --calibration-sequences 4 "
    [made_by] = [words for words in shown if words.startswith(command)]
    assert made_by.endswith(" --out gguf-Q8_0")
    assert "quantkit serve gguf-Q8_0" in shown  # the same folder
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(next(words for words in shown if words.startswith("method: gguf")))
    assert load_recipe(recipe).model_dump(exclude={"out", "device"}) == manifest.recipe.model_dump()
    assert made.count("<h4>Convert</h4>") == 2


def test_a_manifest_belongs_to_a_report_by_its_digest(comparison, tmp_path):
    copy = tmp_path / "moved"
    (copy / "artifacts").mkdir(parents=True)
    (copy / "table.json").write_bytes((comparison / "table.json").read_bytes())
    for name, change in (("rtn-4", ('"seed": 0', '"seed": 1')), ("gguf-Q8_0", ('"recipe"', '"recipes"'))):
        folder = copy / "artifacts" / name
        folder.mkdir()
        text = (comparison / "artifacts" / name / MANIFEST).read_text()
        assert change[0] in text
        (folder / MANIFEST).write_text(text.replace(*change, 1))
    succeeds("report", copy, "--out", tmp_path / "page.html")
    made = (tmp_path / "page.html").read_text()
    assert made.count("Its manifest is not next to its report") == 2
    assert "<h4>Convert</h4>" not in made
    assert "is corrupted" in made


def test_what_cannot_be_a_page_is_refused(comparison, tmp_path):
    for given, words in (
        ((tmp_path,), "has no table.json"),
        ((comparison, "--max-size", "1XB"), "--max-size = '1XB' is not a size"),
        ((comparison, "--max-kld", -1), "--max-kld"),
    ):
        done = quantkit("report", *given, "--out", tmp_path / "page.html")
        assert done.code in (1, 2)
        assert words in done.err
    assert list(tmp_path.iterdir()) == []


def test_the_files_of_the_page_are_packaged():
    root = Path(package.__file__).parent
    settings = tomllib.loads((root.parent / "pyproject.toml").read_text())
    globs = settings["tool"]["setuptools"]["package-data"]["quantkit"]
    packaged = {path for pattern in globs for path in root.glob(pattern)}
    beside = {path for path in (root / "report").iterdir() if path.suffix in (".css", ".js", ".html", ".md")}
    assert len(beside) == 4
    assert beside <= packaged


@pytest.mark.parametrize("value", [0.0, 1e150])
def test_no_figure_of_a_report_breaks_the_page(value):
    odd = {"value": value, "stderr": float("nan"), "sums": (value, -value, 0.0, value)}
    reports = []
    for one in sheet(1, 3).reports:
        measured = [
            m.model_copy(update=odd | {"details": {**m.details, "p99": value, "other": "<b>"}})
            for m in one.measurements
        ]
        reports.append(one.model_copy(update={"measurements": tuple(measured)}))
    made = page(join_tables([("\udc80", Table(tuple(reports)))]))
    assert "<b>" not in json.dumps(data_of(made))
    assert saved(made, "table.csv").count("\\udc80") == len(reports) * len(reports[0].measurements)
    assert histogram([1e308, -1e308])["bars"].count("v-") == 1
    made = page(join_tables([(None, Table((report("some", "gptq", None, 1e6),)))]))  # without divergence
    Reader(made)
    assert "No divergence from the source was measured." in made


def manifest(name):
    recipe = ConvertRecipe(model=name, method=name, bits=name, format=name, options={name: name}, revision=name)
    source = SourceEntry(model=name, revision=name, architecture=name, parameters=1, config={}, hashes={})
    return Manifest(
        recipe=recipe, format=name, options={name: name}, source=source, versions={name: name}, tensor_types={name: 1},
        weight_files=(name,), weight_bytes=1, bits_per_weight=4, notes=(name,), files={},
        weight_error=WeightError(mean=0.1, worst=0.2, worst_tensor=name),
    )  # fmt: skip


def hostile(name):
    """A page in which `name` stands wherever others decide on a text."""
    reports = []
    for i, kld in enumerate((0.001, 0.5, 0.02)):
        entry = ModelEntry(label=f"{name}{i}", name=name, method=name if i else None, digest=name, notes=(name,))
        one = report(name, "gptq", 21.0 + i, 1e6 + 1e5 * i, {1: 5.0 + i}, engine=name, model=entry, notes=())
        text = one.text.model_copy(update={"name": name})
        about = one.hardware.model_copy(update={"cpu": name})
        reports.append(diverging(one, kld, seed=i, text=text, hardware=about, notes=(name,)))
    made = join_tables([(name, Table(tuple(reports)))])
    artifacts = {name: Artifact(Path(name), manifest(name))}
    return page(made, artifacts, (name,), server=lambda _: name)
