"""The page in a real browser: no complaint, no request, no script of others, figures as they were measured."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from browser import FOUND, Browser, browser
from made_up_reports import sheet
from pages import hostile, written
from test_hostile_names import NAME

from quantkit.report.page.page import page
from quantkit.report.page.view import View
from quantkit.report.sheet import Sheet

pytestmark = pytest.mark.skipif(FOUND is None, reason="no Chromium is installed")
COLUMN = "[...document.querySelector('#figures').tBodies[0].rows].map((row) => row.cells[{}].innerText)"
ATTACK = "</script><script>window.hit=1</script><img src=x onerror='window.hit=1'><svg onload='window.hit=1'>"


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with ExitStack() as stack:
        try:
            one = stack.enter_context(browser())
        except AssertionError as error:
            pytest.skip(f"{FOUND} does not start here: {error}")
        yield one


@pytest.fixture(scope="module")
def two() -> Sheet:
    return sheet(2, 5)


@pytest.fixture
def shown(opened: Browser, two: Sheet, tmp_path: Path) -> Iterator[Browser]:
    """The page of two models; what it asked for and complained of is looked at when the test is done."""
    opened.requests.clear()
    path = written(tmp_path, page(View(two)))
    opened.open(path)
    yield opened
    opened.run("1")  # what came before it has arrived
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("file:", "blob:"))] == []
    assert opened.requests[0] == path.as_uri()
    opened.requests.clear()


def sorted_by(shown: Browser, column: int) -> list[str]:
    shown.run(f"document.querySelectorAll('#figures th button')[{column}].click()")
    cells: list[str] = shown.run(COLUMN.format(column))
    return cells


def test_a_column_sorts_by_its_numbers_and_back(shown: Browser, two: Sheet) -> None:
    titles = shown.run("[...document.querySelectorAll('#figures th button')].map((button) => button.innerText)")
    size = titles.index("file size")
    numbers = [float(cell.split()[0]) for cell in sorted_by(shown, size)]
    assert len(numbers) == 10
    assert numbers == sorted(numbers)
    assert numbers != sorted(numbers, reverse=True)
    assert shown.run("document.querySelector('#figures th[aria-sort]').ariaSort") == "ascending"
    numbers = [float(cell.split()[0]) for cell in sorted_by(shown, size)]
    assert numbers == sorted(numbers, reverse=True)
    assert shown.run("document.querySelectorAll('#figures th[aria-sort]').length") == 1
    names = sorted_by(shown, 1)
    assert names == sorted(names)
    # What was not measured stays at the end both ways.
    for _ in range(2):
        cells = sorted_by(shown, titles.index("ms/token @ 2 threads"))
        assert [cell == "-" for cell in cells] == [*[False] * 8, True, True]
    sorted_by(shown, size)
    # Whole rows move: a name keeps its figures.
    row = shown.run("[...document.querySelector('#figures').tBodies[0].rows[0].cells].map((cell) => cell.innerText)")
    model = two.rows(row[0])
    assert row[2:] == [measure.cells[two.columns.index(row[1])] for measure in model]


def test_the_picture_shows_the_figures_of_the_chosen_model(shown: Browser, two: Sheet) -> None:
    count = "document.querySelectorAll('#chart a').length"
    assert shown.run(count) == 10
    choice = "document.querySelectorAll('#choices select')[2]"
    shown.run(f"{choice}.value = '1'; {choice}.dispatchEvent(new Event('change'))")
    assert shown.run(count) == 5
    words = shown.run("[...document.querySelectorAll('#chart a')].map((a) => a.getAttribute('aria-label'))")
    kld = two.reports(two.models[1])[1].find("kld")
    assert kld is not None
    assert words[1].startswith(f"org/model-1, awq-1; KLD from source, nats: {float(f'{kld.value:.4g}')}")


def test_data_is_saved_unpacked(shown: Browser, two: Sheet, tmp_path: Path) -> None:
    shown.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    for name, content in (("table.json", two.to_json()), ("table.csv", two.to_csv())):
        shown.run(f"document.querySelector('a[download=\"{name}.gz\"]').click()")
        end, path = time.monotonic() + 10, tmp_path / name
        while not (path.exists() and path.stat().st_size >= len(content)) and time.monotonic() < end:
            time.sleep(0.02)
        assert path.read_text() == content


@pytest.mark.parametrize("name", [NAME, f"--><!--<script>{ATTACK}", f"'\"{ATTACK}"])
def test_no_text_of_others_runs(name: str, opened: Browser, tmp_path: Path) -> None:
    opened.requests.clear()
    opened.open(written(tmp_path, hostile(name)))
    opened.run("document.querySelectorAll('details').forEach((fold) => fold.open = true)")
    assert opened.run("document.querySelectorAll('#chart a').length") == 3
    opened.run("document.querySelectorAll('#chart a')[1].focus()")
    visible = " ".join(name.replace("\x1b", "\\x1b").split())
    assert opened.run("document.getElementById('tip').textContent").startswith(f"{visible}1\n")
    assert opened.run("document.querySelector('h1').textContent") == f"{visible}: what was measured"
    assert opened.run("window.hit") is None
    assert opened.run("document.querySelectorAll('img, #chart svg').length") == 0
    assert opened.complaints == []
    assert len(opened.requests) == 1


def test_what_would_get_in_is_stopped_at_the_door(opened: Browser, tmp_path: Path) -> None:
    """Were a text not escaped, the page's policy would run nothing and load nothing."""
    made = hostile("x").replace("<main>", f"<main>{ATTACK}<link rel=stylesheet href='https://x.invalid/x.css'>", 1)
    opened.requests.clear()
    opened.open(written(tmp_path, made))
    assert opened.run("window.hit") is None
    assert len(opened.requests) == 1
    assert any("Content Security Policy" in line for line in opened.complaints)
    assert opened.run("document.querySelectorAll('#chart a').length") == 3
    opened.complaints.clear()
