"""Damaged inputs of one seed: every one is refused in one line, or done as somebody else would do it."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from killed import forked

from bench.fuzz import __main__ as fuzz
from bench.fuzz import judges

REPOSITORY = Path(__file__).parents[2]
# The kinds whose cases are quickest; `make bench-fuzz` runs all of them.
KINDS = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("model.safetensors", "shards", "index.json", "links", "quantkit.json", "artifact files", "rehashed files"),
    *("GGUF file", "importance file", "recipe", "command line", "output folder"),
)


@pytest.mark.slow
def test_three_hundred_damaged_inputs():
    command = [sys.executable, "-m", "bench.fuzz", "--seed", "20", "--cases", "300", "--kinds", ",".join(KINDS)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "| all | 300 |" in done.stdout, done.stdout


def say_no():
    judges.source = lambda *_: "somebody else refuses it"


def run_fuzzer(prepare, *arguments):
    """With these arguments after `prepare`; its table goes to standard error."""
    sys.argv, sys.stdout = ["bench.fuzz", *arguments], sys.stderr
    if prepare is not None:
        prepare()
    sys.exit(fuzz.main())


@pytest.mark.parametrize(("prepare", "found"), [(None, "done, right"), (say_no, "TAKEN")])
def test_its_judges_find_what_is_wrong_and_nothing_else(prepare, found, tmp_path):
    arguments = ("--seed", "20", "--case", "config.json:1", "-v", "--sound")
    told = forked(partial(run_fuzzer, prepare, *arguments), tmp_path / "log").wait(int(prepare is not None))
    assert f"{found} config.json:1" in told, told
