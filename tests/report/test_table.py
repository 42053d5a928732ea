import csv
import io
import json
import re
from itertools import product

import pytest
from made_up_reports import BASELINE, HARDWARE, TEXT, WINDOWS, diverging, figure, report
from rich.console import Console
from tiny_models import fails, quantkit, succeeds

from quantkit.errors import ReportError
from quantkit.records.recipe import EvaluationSpec
from quantkit.report.plot import draw
from quantkit.report.table import LEGEND, Table, join_tables, read_tables, shared_fields, write_table
from quantkit.system.sizes import megabytes

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
- **Bold**: better than every other quantized copy beyond the error of the difference (95 %).

<details><summary>All notes</summary>

- Perplexity ± standard error: protocol llama.cpp, 4 windows of 512 tokens, the second half of each scored (1020 \
tokens).
- Text: some.txt, sha256 0123456789ab.
- Hardware: Test CPU, 2 cores, 8 GB.
- ms/token: batch 1, greedy, median of the repeats after a warm-up.
- transformers 1.0, computing in float32: bfloat16.
- reference 1.0, computing in float32: gptq-4.
- llamacpp 1.0, computing in float32: gguf-Q2_K.
- gptq-4: calibrated on 64 sequences (asked: 128; it holds no more) of a text.

</details>
"""
# Fields of a report that must agree in a table, and what an error calls them.
COMPARED_FIELDS = {
    "model": {"name": "model"},
    "text": {"sha256": "text"},
    "windows": {"protocol": "protocol", "n_ctx": "n_ctx", "windows": "windows", "tokens_sha256": "tokens"},
    "engine": {},
    "hardware": {"cpu": "hardware"},
    "baseline": {"sha256": "baseline", "dtype": "type of the baseline"},
    "settings": {name: name for name in ("new_tokens", "max_tokens", "price_per_hour")},
}
PRICED = (figure("answers_seconds@1", 7.0, n=9, stderr=0.25), figure("cost_per_1000_tokens@1", 0.01))
FULL = report("bfloat16", None, 20.0, 2e6, {1: 50.0}, engine="transformers", baseline=BASELINE, more=PRICED)
MANY = Table((SOURCE, *(report(f"variant-{i}", "gptq", 21.0 + i, 1e6 + i * 1e5, {1: 9.0 + i}) for i in range(8))))
OTHER = HARDWARE.model_copy(update={"cpu": "Other CPU"})
GPTQ = report("gptq-4", "gptq", 21.5, 0.6e6, {1: 20.0, 4: 12.25})
SIX = report("gguf-Q6_K", "gguf", 20.5, 0.8e6, {1: 30.0}, engine="llamacpp")
HERE = Table((SOURCE, GPTQ, SIX))
FASTER = [("bfloat16", None, 20.0, 2e6, {4: 5.0}), ("gptq-4", "gptq", 21.5, 0.6e6, {4: 2.0})]
THERE = Table(tuple(report(*given, hardware=OTHER) for given in FASTER))
SLOWER = [("float16", None, 10.0, 8e6, {1: 99.0}), ("gptq-4", "gptq", 10.5, 2.4e6, {1: 66.0})]
FIVE = WINDOWS.model_copy(update={"tokens_sha256": "bb" * 32, "windows": 5})
UNLIKE = {
    "n_ctx": {"windows": WINDOWS.model_copy(update={"n_ctx": 256})},
    "text": {"text": TEXT.model_copy(update={"sha256": "ff" * 32})},
    "type of the baseline": {"baseline": FULL.baseline},
    "new_tokens": {"settings": EvaluationSpec(new_tokens=9)},
}
NO_TABLES = {
    "{": "sheet.json",
    "[" * 100_000: "sheet.json",
    '{"reports": [5]}': "has no report",
    '{"parts": [3]}': "not a list of tables",
    '{"parts": []}': "at least one report",
    '{"parts": [{"machine": "a", "reports": []}]}': "at least one report",
    '{"parts": [{"machine": "a", "reports": [{}]}]}': "sheet.json",
}


def test_markdown_and_a_variant_in_a_line():
    assert TABLE.to_markdown() == MARKDOWN
    assert [megabytes(size) for size in (123_456, 269_060_552, 2.5e9)] == ["0.1 MB", "269.1 MB", "2.50 GB"]
    line = "perplexity 21.50 ± 1.07, file size 0.6 MB, 20.0 ms/token @ 1 thread, 12.2 ms/token @ 2 threads"
    assert Table((SOURCE, FOUR)).line() == f"gptq-4: {line}"


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
    assert {row.title: row.cells for row in table.rows()} == {
        "KLD from source": ("0.10000 ± 0.01000",), "KLD, 99th percentile": ("0.7500",), "peak memory": ("300.0 MB",),
        "prompt tokens/s (pp512) @ 2 threads": ("300.0 ± 2.5",), "generated tokens/s (tg128) @ 1 thread": ("20.0",),
        "answers: ms to first token @ 1 thread": ("4.0 / 5.5 / 6.0",), "answers: tokens/s @ 1 thread": ("7.0 ± 0.2",),
        "cost per 1,000 tokens @ 1 thread": ("0.0123",), "engine": ("transformers",),
    }  # fmt: skip
    notes = "\n".join(table.notes(full=True))
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


def with_another(record, field):
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
    judged = next(iter(FULL.measurements)).model_copy(update={"name": "answers_seconds@1"})
    everything = FULL.model_copy(update={"measurements": (*FULL.measurements, judged)})
    compared = {field for field, *_ in shared_fields(everything, "")}
    assert compared == {name for fields in COMPARED_FIELDS.values() for name in fields.values()}


def test_settings_of_figures_that_only_one_has_may_differ():
    spec = EvaluationSpec(new_tokens=5, max_tokens=6, price_per_hour=7.0)
    without = tuple(m for m in FULL.measurements if "@" not in m.name)
    assert Table((FULL, FULL.model_copy(update={"settings": spec, "measurements": without})))


def test_the_files_are_written(tmp_path):
    folder = tmp_path / "new" / "folder"
    write_table(TABLE, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["table.csv", "table.json", "table.md"]
    assert (folder / "table.md").read_text(encoding="utf-8") == MARKDOWN
    svg, png = draw(TABLE, folder)
    assert (svg.name, png.name) == ("perplexity-size.svg", "perplexity-size.png")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = svg.read_text(encoding="utf-8")
    # Letters are drawn as paths; matplotlib leaves the text beside them.
    across = "size of the weight files relative to float16"
    for label in ("bfloat16", "gptq-4", "gguf-Q2_K (12346 ↑)", "some.txt", across):
        assert f"<!-- {label} -->" in text
    assert len(re.findall(r'style="fill: none; stroke-dasharray', text)) == 1  # the source's level
    assert [path.read_bytes() for path in draw(TABLE, tmp_path)] == [svg.read_bytes(), png.read_bytes()]
    assert draw(Table((report("a", None, None, 1e6),)), tmp_path) == []


def shown(table, width, transpose=None, notes=False):
    console = Console(width=width, file=io.StringIO())
    table.show(console, transpose=transpose, notes=notes)
    return console.file.getvalue()


@pytest.mark.parametrize("table", [TABLE, MANY], ids=["three", "many"])
def test_every_figure_is_there_at_any_width(table):
    for transpose, width in product((None, True, False), (200, 110, 60, 45)):
        text = shown(table, width, transpose)
        for row in table.rows():
            for cell in row.cells:
                assert f" {cell} " in text
        assert max(len(line) for line in text.splitlines() if line[:1] in "┏┃┡│└") <= width


def test_the_best_is_marked():
    """Sizes are exact; the perplexities' errors are larger than their differences."""
    text = shown(MANY, 200, transpose=True)
    cells = [cell.strip() for line in text.split("└")[0].splitlines() for cell in line.split("│")]
    assert sorted(cell for cell in cells if cell.endswith("*")) == ["1.0 MB *", "8.00 *"]
    assert LEGEND in text
    # Notes are short unless asked for.
    assert all(line in shown(TABLE, 200) for line in TABLE.notes())
    assert all(line in shown(TABLE, 200, notes=True) for line in TABLE.notes(full=True))


def test_an_uncompressed_copy_is_not_the_best_and_nothing_has_no_sign():
    sizes = {"gguf-F16": (2e6, 1e-9), "gptq-4": (0.6e6, 0.1), "rtn-4": (0.6e6, 0.2)}
    copies = [diverging(report(label, "gguf", 20.0, size), kld) for label, (size, kld) in sizes.items()]
    [row] = [row for row in Table(tuple(copies)).rows() if row.title == "KLD from source"]
    assert copies[row.best].model.label == "gptq-4"
    assert figure("kld", -1e-9, stderr=0.0).text(5) == "0.00000 ± 0.00000"


def test_the_noise_floor_is_the_source_where_that_was_judged_in_bfloat16():
    source = diverging(SOURCE, 0.001)
    floor = "the source in bfloat16 has a KLD of 0.0006 ± 1e-05 on the first windows"
    assert any(floor in note for note in Table((source,)).notes(full=True))
    source = source.model_copy(update={"engine": source.engine.model_copy(update={"dtype": "bfloat16"})})
    [note] = [note for note in Table((source,)).notes(full=True) if "Noise floor" in note]
    assert f"the source in bfloat16 has a KLD of {source.find('kld').text(5)}; storing" in note


def of_model(one, name, **changes):
    return one.model_copy(update={"model": one.model.model_copy(update={"name": name}), **changes})


LARGE = Table(tuple(of_model(report(*given, windows=FIVE), "large") for given in SLOWER))

SHEET = """\
| Model | Measure | bfloat16 | float16 | gptq-4 | gguf-Q6_K |
|---|---|---:|---:|---:|---:|
| tiny | perplexity | 20.00 ± 1.00 | - | 21.50 ± 1.07 | 20.50 ± 1.02 |
| tiny | file size | 2.0 MB | - | **0.6 MB** | 0.8 MB |
| tiny | bits per weight | 16.00 | - | **4.80** | 6.40 |
| tiny | ms/token @ 1 thread, Test CPU | 50.0 | - | 20.0 | 30.0 |
| tiny | ms/token @ 2 threads, Test CPU | 30.0 | - | - | - |
| tiny | ms/token @ 4 threads, Test CPU | - | - | 12.2 | - |
| tiny | ms/token @ 4 threads, the card | 5.0 | - | 2.0 | - |
| large | perplexity | - | 10.00 ± 0.50 | 10.50 ± 0.53 | - |
| large | file size | - | 8.0 MB | 2.4 MB | - |
| large | bits per weight | - | 64.00 | 19.20 | - |
| large | ms/token @ 1 thread, Test CPU | - | 99.0 | 66.0 | - |
"""


def test_models_stand_below_each_other_and_speeds_once_a_machine():
    sheet = join_tables([(None, HERE), (None, LARGE), ("the card", THERE)])
    assert sheet.models == ["tiny", "large"]
    assert list(dict.fromkeys(sheet.machines)) == ["Test CPU", "the card"]
    assert sheet.to_markdown().startswith(SHEET)
    alone = join_tables([(None, HERE), (None, LARGE)]).rows("tiny")
    assert "ms/token @ 1 thread" in [row.title for row in alone]  # one machine is not named


def test_notes_of_several_models_name_theirs_and_stand_there_once():
    both = report("gptq-4", "gptq", 10.5, 2.4e6, notes=(NOTE, "of large alone"), windows=FIVE)
    large = Table((of_model(both, "large"),))
    here = Table(
        (SOURCE, report("gptq-4", "gptq", 21.5, 0.6e6, notes=(NOTE,)), report("rtn", "rtn", 30.0, 1e6, notes=(NOTE,)))
    )
    for full, short in ((False, "calibrated on 64 sequences"), (True, NOTE)):
        notes = join_tables([(None, here), (None, large)]).notes(full)
        assert [note for note in notes if "calibrated" in note] == [f"tiny (gptq-4, rtn), large (gptq-4): {short}."]
        assert "large (gptq-4): of large alone." in notes
        assert len([note for note in notes if note.startswith("large: Perplexity")]) == 1
        assert len(notes) == len(set(notes))


def test_two_files_of_one_name_on_one_machine_are_refused():
    other = GPTQ.model_copy(update={"model": GPTQ.model.model_copy(update={"digest": "other"})})
    with pytest.raises(ReportError, match="Test CPU has two different files with the label gptq-4"):
        join_tables([(None, HERE), (None, Table((SOURCE, other)))])
    longer = GPTQ.model_copy(update={"windows": GPTQ.windows.model_copy(update={"windows": 3})})
    with pytest.raises(ReportError, match=r"cannot be in one table: their .* differs"):
        join_tables([(None, HERE), (None, Table((longer,)))])
    notes = join_tables([(None, HERE), ("b", Table((SOURCE, other)))]).notes()
    assert "tiny, gptq-4: the files on b differ from those on Test CPU." in notes


def test_a_figure_that_machines_do_not_agree_on_is_told():
    def told(value):
        there = Table((SOURCE, report("gptq-4", "gptq", value, 0.6e6)))
        return [n for n in join_tables([("a", HERE), ("b", there)]).notes() if n.startswith("tiny, gptq-4")]

    assert told(21.5 * (1 + 1e-5)) == []
    assert told(21.6) == ["tiny, gptq-4: perplexity is 21.50 ± 1.07 on a and 21.60 ± 1.08 on b."]


def test_unlike_tables_are_refused_by_the_field_that_differs():
    for field, changes in UNLIKE.items():
        large = Table((of_model(report("a", None, 1.0, 1e6, {1: 1.0}), "large", **changes),))
        machine = Table((report("bfloat16", None, 20.0, 2e6, {1: 5.0}, **changes),))
        for tables in ([(None, HERE), (None, large)], [(None, HERE), (None, LARGE), ("b", machine)]):
            with pytest.raises(ReportError, match=f"their {field} differs"):
                join_tables(tables)
    for field, changes in (("windows", {"windows": 5}), ("tokens", {"tokens_sha256": "ee" * 32})):
        machine = Table((SOURCE.model_copy(update={"windows": WINDOWS.model_copy(update=changes)}),))
        with pytest.raises(ReportError, match=f"of tiny on Test CPU and .* of tiny on b cannot .* their {field} diff"):
            join_tables([(None, HERE), ("b", machine)])
        assert join_tables([(None, HERE), (None, Table((of_model(machine.reports[0], "large"),)))])  # another tokenizer


def test_other_answers_are_unlike_and_prices_are_not():
    def of(tokens, price):
        figures = (figure("answers_seconds@1", 1.0, n=9, stderr=0.1), figure("cost_per_1000_tokens@1", 1.0))
        spec = EvaluationSpec(max_tokens=tokens, price_per_hour=price)
        return Table((SOURCE.model_copy(update={"measurements": figures, "settings": spec}),))

    assert join_tables([("a", of(200, 1.0)), ("b", of(200, 2.0))])
    with pytest.raises(ReportError, match=r"their max_tokens differs .200 and 100.\."):
        join_tables([("a", of(200, 1.0)), ("b", of(100, 1.0))])


def test_tables_and_reports_are_joined_by_the_command(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "table.json").write_text(HERE.to_json())
    (tmp_path / "there.json").write_text(THERE.to_json())
    (tmp_path / "one.json").write_text(LARGE.reports[0].model_dump_json())
    out = tmp_path / "out"
    words = (tmp_path / "here", f"the card={tmp_path / 'there.json'}", tmp_path / "one.json")
    ended = succeeds("table", *words, "--out", out, "--json", tmp_path / "sheet.json")
    for part in ("tiny", "large", "ms/token @ 4 threads, the card", "21.50", "Hardware: Other CPU", "0.6 MB *"):
        assert part in ended.out
    assert (out / "table.md").read_text() == join_tables(
        [(None, HERE), ("the card", THERE), (None, Table(LARGE.reports[:1]))]
    ).to_markdown()
    assert sorted(path.name for path in out.iterdir()) == [
        *("perplexity-size.png", "perplexity-size.svg", "table.csv", "table.json", "table.md")
    ]
    again = quantkit("table", out)
    assert re.sub(r"\s+", " ", again.out) == re.sub(r"\s+", " ", ended.out)
    assert [label for label, _ in read_tables(tmp_path / "sheet.json")] == ["Test CPU", "the card", "Test CPU"]


def test_what_is_no_table_is_told(tmp_path):
    for text, told in NO_TABLES.items():
        (tmp_path / "sheet.json").write_text(text)
        ended = fails("table", tmp_path / "sheet.json", says=told)
        assert ended.out == ""
        assert len(ended.err.splitlines()) == 1
    (tmp_path / "sheet.json").write_text(join_tables([(None, HERE), ("the card", THERE)]).to_json())
    for place, told in (
        (tmp_path, "has no table.json"),
        (f"other={tmp_path / 'sheet.json'}", "has tables of several machines"),
    ):
        assert told in fails("table", place).err.lower()
