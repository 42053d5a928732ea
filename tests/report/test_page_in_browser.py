import json
import os
import re
import shutil
import subprocess
from html import unescape

import pytest
from made_up_reports import sheet
from test_hostile_names import NAME
from test_page import hostile

from quantkit.report.page import page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(FOUND is None, reason="no Chromium is installed")
ATTACK = "</script><script>window.hit=1</script><img src=x onerror='window.hit=1'><svg onload='window.hit=1'>"
# What is found out is written into the page's title; the page's policy does not know this script.
PROBE = """<script>
const all = (selector) => [...document.querySelectorAll(selector)];
const column = (i) => [...document.querySelector('#figures').tBodies[0].rows].map((row) => row.cells[i].innerText);
setTimeout(() => { document.title = JSON.stringify(%s); }, 500);
</script></body>"""


def opened(folder, content, expression, width=800):
    """The value of an expression of JavaScript in the page, and what the browser complained of."""
    path = folder / "page.html"
    path.write_text(content.replace("</body>", PROBE % expression), encoding="utf-8")
    flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    flags += [f"--window-size={width},900"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []
    command = [FOUND, *flags, f"--user-data-dir={folder}", "--virtual-time-budget=3000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    if done.returncode or title is None:
        pytest.skip(f"{FOUND} does not start here: {done.stderr[-300:]}")
    return json.loads(unescape(title[1])), re.findall(r"CONSOLE.*", done.stderr)


def without_policy(content):
    made = re.sub(r"<meta http-equiv=[^>]*>", "", content)
    assert made != content
    return made


def test_columns_sort_and_the_picture_shows_the_chosen_model(tmp_path):
    two = sheet(2, 5)
    steps = """(() => {
        const buttons = all('#figures th button'), titles = buttons.map((button) => button.innerText);
        const sorted = (i) => { buttons[i].click(); return column(i); };
        const size = titles.indexOf('file size'), speed = titles.indexOf('ms/token @ 2 threads');
        const found = { up: sorted(size), down: sorted(size), speed: [sorted(speed), sorted(speed)] };
        found.row = [...document.querySelector('#figures').tBodies[0].rows[0].cells].map((cell) => cell.innerText);
        found.all = all('#chart a').length;
        const choice = all('#choices select')[2];
        choice.value = '1';
        choice.dispatchEvent(new Event('change'));
        return { ...found, chosen: all('#chart a').map((a) => a.getAttribute('aria-label')) };
    })()"""
    found, complaints = opened(tmp_path, without_policy(page(two)), steps)
    assert complaints == []
    up, down = ([float(cell.split()[0]) for cell in found[way]] for way in ("up", "down"))
    assert len(up) == 10
    assert up == sorted(up) == down[::-1]
    assert up != down
    for cells in found["speed"]:  # what was not measured stays at the end both ways
        assert [cell == "-" for cell in cells] == [*[False] * 8, True, True]
    # Whole rows move: a name keeps its figures.
    model, label, *figures = found["row"]
    assert figures == [measure.cells[two.columns.index(label)] for measure in two.rows(model)]
    assert (found["all"], len(found["chosen"])) == (10, 5)
    kld = two.variants(two.models[1])[1].find("kld")
    assert found["chosen"][1].startswith(f"org/model-1, awq-1; KLD from source, nats: {float(f'{kld.value:.4g}')}")


LAYOUT = """(() => {
    const marks = all('#chart .mark').map((mark) => mark.getBoundingClientRect());
    const far = (box, mark) => {
        const x = (mark.left + mark.right) / 2, y = (mark.top + mark.bottom) / 2;
        return Math.hypot(Math.max(box.left - x, x - box.right, 0), Math.max(box.top - y, y - box.bottom, 0));
    };
    const strangers = all('#chart a').filter((link, i) => {
        const box = link.querySelector('text').getBoundingClientRect(), own = far(box, marks[i]);
        const near = (mark, j) => far(box, mark) < own && far(marks[i], mark) > 10;
        return !link.querySelector('.lead') && marks.some(near);
    });
    return {
        cut: all('.wide').map((part) => part.scrollWidth - part.clientWidth),
        letters: Math.min(...all('#chart text').map((text) => text.getBoundingClientRect().height)),
        labels: all('#chart a text').length,
        strangers: strangers.length,
        broken: all('.number').filter((number) => number.getClientRects().length > 1).length,
        beyond: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    };
})()"""


@pytest.mark.parametrize("body", [None, "width: 400px"])
def test_figures_and_labels_are_whole_at_any_width(body, tmp_path):
    """On a desktop nothing has to be scrolled; on a phone letters keep their size, and no number is broken."""
    made = without_policy(page(sheet(1, 11)))
    if body is not None:
        made = made.replace("<body>", f'<body style="{body}">')
    found, complaints = opened(tmp_path, made, LAYOUT, 1280)
    assert complaints == []
    assert body or found["cut"] == [0, 0]
    assert found["letters"] >= 10
    assert found["labels"] == 11
    assert (found["strangers"], found["broken"], found["beyond"]) == (0, 0, 0)


@pytest.mark.parametrize("name", [NAME, f"--><!--<script>{ATTACK}", f"'\"{ATTACK}"])
def test_no_text_of_others_runs(name, tmp_path):
    """Not even without the page's policy."""
    steps = "[all('#chart a').length, window.hit || 0, all('img, #chart svg').length, all('h1')[0].textContent]"
    found, complaints = opened(tmp_path, without_policy(hostile(name)), steps)
    visible = " ".join(name.replace("\x1b", "\\x1b").split())
    assert found == [3, 0, 0, f"{visible}: quantization results"]
    assert complaints == []


def test_what_would_get_in_is_stopped_at_the_door(tmp_path):
    """Were a text not escaped, the page's policy would run nothing and load nothing."""
    attack = ATTACK.replace("window.hit=1", "document.title=1")
    made = hostile("x").replace("<main>", f"<main>{attack}<link rel=stylesheet href='https://x.invalid/x.css'>", 1)
    with pytest.raises(json.JSONDecodeError):
        opened(tmp_path, made, "1")
