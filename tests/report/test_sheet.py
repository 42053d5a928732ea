"""One sheet of several models and machines: what stands once, what stands for each machine, and what is refused."""

import re

import pytest
from made_up_reports import HARDWARE, TEXT, WINDOWS, figure, report
from test_table import FULL, SOURCE
from tiny_models import fails, quantkit, succeeds

from quantkit.errors import ReportError
from quantkit.recipe import EvaluationSpec
from quantkit.report.sheet import joined, read_tables
from quantkit.report.table import Table

OTHER = HARDWARE.model_copy(update={"cpu": "Other CPU"})


def of_model(one, name, **changes):
    """A report as if it were of another model, with other values."""
    return one.model_copy(update={"model": one.model.model_copy(update={"name": name}), **changes})


FOUR = report("gptq-4", "gptq", 21.5, 0.6e6, {1: 20.0, 4: 12.25})
SIX = report("gguf-Q6_K", "gguf", 20.5, 0.8e6, {1: 30.0}, engine="llamacpp")
HERE = Table((SOURCE, FOUR, SIX))
THERE = Table(
    tuple(
        r.model_copy(update={"hardware": OTHER})
        for r in (report("bfloat16", None, 20.0, 2e6, {4: 5.0}), report("gptq-4", "gptq", 21.5, 0.6e6, {4: 2.0}))
    )
)
LARGE = Table(
    tuple(
        of_model(r, "large", windows=WINDOWS.model_copy(update={"tokens_sha256": "bb" * 32, "windows": 5}))
        for r in (report("float16", None, 10.0, 8e6, {1: 99.0}), report("gptq-4", "gptq", 10.5, 2.4e6, {1: 66.0}))
    )
)

MARKDOWN = """\
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
    sheet = joined([(None, HERE), (None, LARGE), ("the card", THERE)])
    assert sheet.models == ["tiny", "large"]
    assert sheet.machines == ["Test CPU", "the card"]
    assert sheet.to_markdown().startswith(MARKDOWN)
    alone = joined([(None, HERE), (None, LARGE)]).rows("tiny")
    assert "ms/token @ 1 thread" in [row.title for row in alone]  # one machine is not named


def test_two_files_of_one_name_on_one_machine_are_refused():
    other = FOUR.model_copy(update={"model": FOUR.model.model_copy(update={"digest": "other"})})
    with pytest.raises(ReportError, match="two different files are called gptq-4 on Test CPU"):
        joined([(None, HERE), (None, Table((SOURCE, other)))])
    notes = joined([(None, HERE), ("b", Table((SOURCE, other)))]).notes()
    assert "tiny, gptq-4: the files on b are others than those on Test CPU." in notes


def test_a_figure_that_machines_do_not_agree_on_is_told():
    def told(value):
        there = Table((SOURCE, report("gptq-4", "gptq", value, 0.6e6)))
        return [n for n in joined([("a", HERE), ("b", there)]).notes() if n.startswith("tiny, gptq-4")]

    assert told(21.5 * (1 + 1e-5)) == []
    assert told(21.6) == ["tiny, gptq-4: perplexity is 21.50 ± 1.07 on a and 21.60 ± 1.08 on b."]


UNLIKE = {
    "n_ctx": {"windows": WINDOWS.model_copy(update={"n_ctx": 256})},
    "text": {"text": TEXT.model_copy(update={"sha256": "ff" * 32})},
    "type of the baseline": {"baseline": FULL.baseline},
    "new_tokens": {"settings": EvaluationSpec(new_tokens=9)},
}


def test_unlike_tables_are_refused_by_the_field_that_differs():
    for field, changes in UNLIKE.items():
        large = Table((of_model(report("a", None, 1.0, 1e6, {1: 1.0}), "large", **changes),))
        machine = Table((report("bfloat16", None, 20.0, 2e6, {1: 5.0}, **changes),))
        for tables in ([(None, HERE), (None, large)], [(None, HERE), (None, LARGE), ("b", machine)]):
            with pytest.raises(ReportError, match=f"their {field} differs"):
                joined(tables)


def test_machines_judge_a_model_on_the_same_windows():
    for field, changes in (("windows", {"windows": 5}), ("tokens", {"tokens_sha256": "ee" * 32})):
        machine = Table((SOURCE.model_copy(update={"windows": WINDOWS.model_copy(update=changes)}),))
        with pytest.raises(ReportError, match=f"tiny on Test CPU and tiny on b cannot .* their {field} differs"):
            joined([(None, HERE), ("b", machine)])
        assert joined([(None, HERE), (None, Table((of_model(machine.reports[0], "large"),)))])  # another tokenizer


def test_other_answers_are_unlike_and_prices_are_not():
    def of(tokens, price):
        figures = (figure("answers_seconds@1", 1.0, n=9, stderr=0.1), figure("cost_per_1000_tokens@1", 1.0))
        spec = EvaluationSpec(max_tokens=tokens, price_per_hour=price)
        return Table((SOURCE.model_copy(update={"measurements": figures, "settings": spec}),))

    assert joined([("a", of(200, 1.0)), ("b", of(200, 2.0))])
    with pytest.raises(ReportError, match=r"their max_tokens differs .200 and 100.\."):
        joined([("a", of(200, 1.0)), ("b", of(100, 1.0))])


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
    assert (out / "table.md").read_text() == joined(
        [(None, HERE), ("the card", THERE), (None, Table(LARGE.reports[:1]))]
    ).to_markdown()
    assert sorted(path.name for path in out.iterdir()) == [
        *("perplexity-size.png", "perplexity-size.svg", "table.csv", "table.json", "table.md")
    ]
    again = quantkit("table", out)
    assert re.sub(r"\s+", " ", again.out) == re.sub(r"\s+", " ", ended.out)
    assert [label for label, _ in read_tables(tmp_path / "sheet.json")] == ["Test CPU", "the card", "Test CPU"]


NO_TABLES = {
    "{": "sheet.json",
    "[" * 100_000: "sheet.json",
    '{"reports": [5]}': "holds no report",
    '{"parts": [3]}': "no list of tables",
    '{"parts": []}': "at least one table",
    '{"parts": [{"machine": "a", "reports": []}]}': "at least one report",
    '{"parts": [{"machine": "a", "reports": [{}]}]}': "sheet.json",
}


def test_what_is_no_table_is_told(tmp_path):
    for text, told in NO_TABLES.items():
        (tmp_path / "sheet.json").write_text(text)
        ended = fails("table", tmp_path / "sheet.json", says=told)
        assert ended.out == ""
        assert len(ended.err.splitlines()) == 1
    (tmp_path / "sheet.json").write_text(joined([(None, HERE), ("the card", THERE)]).to_json())
    for place, told in (
        (tmp_path, "holds no table.json"),
        (f"other={tmp_path / 'sheet.json'}", "holds tables of several machines"),
    ):
        assert told in fails("table", place).err.lower()
