"""The table says what its reports say, refuses reports of unlike measurements, and fits the terminal."""

import csv
import io
import json
import re

import pytest
from made_up_reports import BASELINE, figure, report

from quantkit.errors import ReportError
from quantkit.recipe import EvaluationSpec
from quantkit.report.plot import draw
from quantkit.report.sheet import read_tables
from quantkit.report.table import COMPARED, SETTINGS_OF, Table, megabytes
from quantkit.sweep.compare import draw_table, write_table

NOTE = "calibrated on 64 sequences (asked: 128; it holds no more) of a text"
SOURCE = report("bfloat16", None, 20.0, 2e6, {1: 50.04, 2: 30.0}, engine="transformers")
FOUR = report("gptq-4", "gptq", 21.5, 0.6e6, {1: 20.0, 2: 12.25}, notes=(NOTE,))
TWO = report("gguf-Q2_K", "gguf", 12345.6, 0.3e6, {1: 10.0}, engine="llamacpp")
TABLE = Table((SOURCE, FOUR, TWO))

MARKDOWN = """\
| Model | Measure | bfloat16 | gptq-4 | gguf-Q2_K |
|---|---|---:|---:|---:|
| tiny | perplexity | 20.00 ± 1.00 | **21.50 ± 1.07** | 12346 ± 617 |
| tiny | file size | 2.0 MB | 0.6 MB | **0.3 MB** |
| tiny | bits per weight | 16.00 | 4.80 | **2.40** |
| tiny | ms/token @ 1 thread | 50.0 | 20.0 | 10.0 |
| tiny | ms/token @ 2 threads | 30.0 | 12.2 | - |
| tiny | engine | transformers | reference | llamacpp |

- Perplexity: llama.cpp, 4 windows of 512 tokens of some.txt.
- Hardware: Test CPU, 2 cores, 8 GB.
- gptq-4: calibrated on 64 sequences.
- **Bold**: better than every other copy beyond the error of the difference (95 %).

<details><summary>Notes in full</summary>

- Perplexity ± standard error: protocol llama.cpp, 4 windows of 512 tokens, the second half of each counted (1020 \
targets).
- Text: some.txt, sha256 0123456789ab.
- Hardware: Test CPU, 2 cores, 8 GB.
- ms/token: batch 1, greedy, median of the repeats after a warm-up.
- transformers 1.0, computing in float32: bfloat16.
- reference 1.0, computing in float32: gptq-4.
- llamacpp 1.0, computing in float32: gguf-Q2_K.
- gptq-4: calibrated on 64 sequences (asked: 128; it holds no more) of a text.

</details>
"""


def test_markdown():
    assert TABLE.to_markdown() == MARKDOWN


def test_figures_of_speed_have_rows():
    """Each with its kind, its threads, and how far it spreads."""
    spread = {"p50": 4.0, "p90": 5.55, "p99": 6.0}
    more = (
        figure("pp512@2", 300.04, n=5, stderr=1.1, details={"stdev": 2.5}),
        figure("tg128@1", 20.0),
        figure("answers_ttft_ms@1", 4.0, n=9, details=spread),
        figure("answers_tokens_per_second@1", 7.0, n=9, stderr=0.25, details={"stdev": 0.75}),
        figure("kld", 0.1, n=9, stderr=0.01, details={"p90": 0.5, "p99": 0.75, "max": 2.0}),
        figure("cost_per_1000_tokens@1", 0.012345),
        figure("peak_rss_bytes", 3e8),
    )
    measured = SOURCE.model_copy(update={"measurements": more})
    table = Table((measured,))
    assert dict(table.rows()) == {
        "KLD from source": ["0.10000 ± 0.01000"],
        "KLD, 99th percentile": ["0.7500"],
        "prompt tokens/s (pp512) @ 2 threads": ["300.0 ± 2.5"],
        "generated tokens/s (tg128) @ 1 thread": ["20.0"],
        "answers: ms to first token @ 1 thread": ["4.0 / 5.5 / 6.0"],
        "answers: tokens/s @ 1 thread": ["7.0 ± 0.2"],
        "cost per 1,000 tokens @ 1 thread": ["0.0123"],
        "peak memory": ["300.0 MB"],
        "engine": ["transformers"],
    }
    notes = "\n".join(table.notes())
    assert "Perplexity" not in notes
    for part in ("as llama-bench", "nine prompts", "Peak memory"):
        assert part in notes


def test_csv_has_a_line_for_every_figure_and_json_comes_back(tmp_path):
    lines = list(csv.DictReader(io.StringIO(TABLE.to_csv())))
    assert len(lines) == 5 + 5 + 4
    assert lines[0] == {
        "model": "tiny", "variant": "bfloat16", "measure": "weight_bytes", "value": "2000000.0", "unit": "bytes",
        "stderr": "", "n": "1",
    }  # fmt: skip
    assert list(lines[-1].values()) == ["tiny", "gguf-Q2_K", "perplexity", "12345.6", "", "617.28", "1020"]
    (tmp_path / "table.json").write_text(TABLE.to_json())
    assert read_tables(tmp_path / "table.json") == [(None, TABLE)]
    assert [r["model"]["label"] for r in json.loads(TABLE.to_json())["reports"]] == TABLE.columns


# Fields of a report that must agree in a table, and what an error calls them.
COMPARED_FIELDS = {
    "model": {"name": "model"},
    "text": {"sha256": "text"},
    "windows": {"protocol": "protocol", "n_ctx": "n_ctx", "windows": "windows", "tokens_sha256": "tokens"},
    "engine": {},
    "hardware": {"cpu": "hardware"},
    "baseline": {"sha256": "baseline"},
    "settings": {name: name for name in ("new_tokens", "max_tokens", "price_per_hour")},
}
PRICED = (figure("answers_seconds@1", 7.0, n=9, stderr=0.25), figure("cost_per_1000_tokens@1", 0.01))
FULL = report("bfloat16", None, 20.0, 2e6, {1: 50.0}, engine="transformers", baseline=BASELINE, more=PRICED)


def with_another(record, field):
    """The full report with another value of one field."""
    part = getattr(FULL, record)
    value = getattr(part, field)
    other = {str: "other", bool: value is False, int: 77, float: 77.0, tuple: ("1",), type(None): 77}[type(value)]
    return FULL.model_copy(update={record: part.model_copy(update={field: other})})


@pytest.mark.parametrize("record", COMPARED_FIELDS)
def test_unlike_reports_are_refused_by_the_field_that_differs(record):
    """The others may differ: of windows and settings the tokens tell."""
    for field in type(getattr(FULL, record)).model_fields:
        called = COMPARED_FIELDS[record].get(field)
        other = with_another(record, field)
        for reports in ((FULL, FULL, other), (other, FULL)):
            if called is None:
                assert len(Table(reports).columns) == len(reports)
            else:
                with pytest.raises(ReportError, match=f"their {called} differs"):
                    Table(reports)
    assert {*COMPARED, *SETTINGS_OF} == {name for fields in COMPARED_FIELDS.values() for name in fields.values()}


def test_settings_of_figures_that_only_one_has_may_differ():
    spec = EvaluationSpec(new_tokens=5, max_tokens=6, price_per_hour=7.0)
    without = tuple(m for m in FULL.measurements if "@" not in m.name)
    assert Table((FULL, FULL.model_copy(update={"settings": spec, "measurements": without})))


def test_a_variant_in_a_line():
    assert [megabytes(size) for size in (123_456, 269_060_552, 2.5e9)] == ["0.1 MB", "269.1 MB", "2.50 GB"]
    assert Table((SOURCE, FOUR)).line() == (
        "gptq-4: perplexity 21.50 ± 1.07, file size 0.6 MB, 20.0 ms/token @ 1 thread, 12.2 ms/token @ 2 threads"
    )


def test_the_files_are_written(tmp_path):
    folder = tmp_path / "new" / "folder"
    write_table(TABLE, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["table.csv", "table.json", "table.md"]
    assert (folder / "table.md").read_text(encoding="utf-8") == MARKDOWN
    svg, png = draw_table(TABLE, folder)
    assert (svg.name, png.name) == ("perplexity-size.svg", "perplexity-size.png")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = svg.read_text(encoding="utf-8")
    # Letters are drawn as paths; matplotlib leaves the text beside them.
    across = "size of the weight files relative to float16"
    for label in ("bfloat16", "gptq-4", "gguf-Q2_K (12346 ↑)", "some.txt", across):
        assert f"<!-- {label} -->" in text
    assert len(re.findall(r'style="fill: none; stroke-dasharray', text)) == 1  # the source's level
    assert [path.read_bytes() for path in draw([TABLE.reports], tmp_path)] == [svg.read_bytes(), png.read_bytes()]
    assert draw([(report("a", None, None, 1e6),)], tmp_path) == []
