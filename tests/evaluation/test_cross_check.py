import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from edits import edit_json, put
from tiny_models import EVALUATION, EVALUATION_FLAGS, succeeds

from quantkit.errors import RecipeError
from quantkit.evaluation import evaluate as evaluation
from quantkit.evaluation.cross_check import cross_check
from quantkit.records.artifact import MANIFEST, open_artifact

QUICK = {key: value for key, value in EVALUATION.items() if key != "threads"}


def test_two_right_readers_agree_and_one_that_takes_the_file_otherwise_is_flagged(gguf, tmp_path, monkeypatch):
    found = cross_check(gguf, **QUICK)
    assert (found.native.engine.name, found.reference.engine.name) == ("llamacpp", "reference")
    assert found.agrees
    assert 0 < found.apart < 0.01
    one, two = (report.find("perplexity") for report in (found.native, found.reference))
    assert found.shift == pytest.approx(np.log(one.value / two.value), abs=1e-6)
    assert "llamacpp and the reference engine agree" in found.lines()
    # Our reader takes the norms' epsilon from the manifest, llama.cpp from its file.
    monkeypatch.setattr(evaluation, "refuse_untrue", lambda _artifact: None)  # which holds one against the other
    folder = Path(shutil.copytree(gguf.folder, tmp_path / "copy"))
    edit_json(folder / MANIFEST, put("source", "config", "rms_norm_eps", value=0.99))
    other = cross_check(open_artifact(folder), **QUICK)
    assert not other.agrees
    assert other.apart > 10 * found.apart
    assert "DISAGREE" in other.lines()[-1]


def test_the_command_prints_both_and_saves_both(gguf, tmp_path):
    path, folder = tmp_path / "check.json", shutil.copytree(gguf.folder, tmp_path / "gguf")
    done = succeeds("eval-ppl", folder, *EVALUATION_FLAGS, "--cross-check", "--json", path, "--card")
    assert all(f"engine {name}" in done.out for name in ("llamacpp", "reference"))
    found = json.loads(path.read_text())
    assert found["agrees"] is True
    perplexity = next(m["value"] for m in found["native"]["measurements"] if m["name"] == "perplexity")
    card = (folder / "README.md").read_text()
    assert f"{perplexity:.2f}"[:5] in card
    assert "llamacpp" in card


def test_one_engine_is_not_checked_against_itself(artifact_of):
    with pytest.raises(RecipeError, match="no engine here besides the reference engine"):
        cross_check(artifact_of("rtn"), **QUICK)
