import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
from gguf_files import slow_but
from huggingface_hub import ModelCard
from killed import Ends, forked
from made_up_reports import report
from tiny_models import CALIBRATION, EVALUATION_FLAGS, FLOAT_METHODS, quantkit, save_tiny, succeeds

from quantkit import convert, open_artifact, verify
from quantkit.errors import ArtifactError
from quantkit.records.artifact import CARD, MANIFEST
from quantkit.records.report import read_report
from quantkit.report.card import front_matter, write_card

SOURCE_CARD = "---\nlicense: apache-2.0\nlanguage:\n- en\n- de\ntags: [chat]\ndatasets: [secret]\n---\n"
BITS = {"gptq": 4, "awq": 4, "rtn": 4, "int8": 8, "fp8": 8, "nf4": 4, "ctranslate2": 8, "gguf": 4, "float": 16}
LIBRARY = {"gguf": "gguf", "ctranslate2": "ctranslate2"}
LOADED_BY = {
    "rtn": ["vllm serve FOLDER", 'AutoModelForCausalLM.from_pretrained("FOLDER"', "optimum gptqmodel"],
    "nf4": ["pip install bitsandbytes", 'AutoModelForCausalLM.from_pretrained("FOLDER"'],
    "ctranslate2": ['ctranslate2.Generator("FOLDER")'],
    "gguf": ["llama-cli -m FOLDER/carded-Q4_K_M.gguf", 'Llama("FOLDER/carded-Q4_K_M.gguf")'],
}
SIZED = report("rtn-4", "rtn", None, 1e6)


@pytest.fixture(scope="session")
def carded(once):
    def make(folder):
        save_tiny(folder, num_hidden_layers=1)
        (folder / CARD).write_text(SOURCE_CARD)
        (folder / "LICENSE").write_text("the licence")

    return once("carded", make)


@pytest.fixture
def made(carded, artifact_of, tmp_path):
    return open_artifact(shutil.copytree(artifact_of("rtn", model=carded).folder, tmp_path / "out"))


def shown(value):
    """An option's value; of a table, the first entries."""
    if not isinstance(value, dict):
        return value
    first = ", ".join(f"{key}={each}" for key, each in [*value.items()][:4])
    return first if len(value) <= 4 else f"{first}, ... ({len(value)} in all)"


@pytest.mark.parametrize("method", slow_but(("gptq", "rtn", "nf4", "ctranslate2", "gguf"), FLOAT_METHODS))
def test_the_card_of_each_method(method, carded, artifact_of):
    artifact = artifact_of(method, model=carded)
    text = (artifact.folder / CARD).read_text()
    card = ModelCard(text)  # the hub's own reader
    assert card.data.base_model == "carded"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.library_name == LIBRARY.get(method, "transformers")
    assert card.data.to_dict()["base_model_relation"] == "quantized"
    assert (card.data.license, card.data.language) == ("apache-2.0", ["en", "de"])
    assert "datasets" not in card.data.to_dict()
    assert card.data.tags == [method, f"{BITS[method]}-bit", "quantkit"]
    m = artifact.manifest
    parts = [f"| bits per weight | {m.bits_per_weight:.2f} |", f"| method | {method} |", "| seed | 0 |", *m.notes]
    options = [f"| {name} | {shown(value)} |" for name, value in m.options.items()]
    for part in (*parts, *options, *LOADED_BY.get(method, [])):
        assert part in text
    assert "{" not in card.content.replace('{"', "")
    assert (artifact.folder / "LICENSE").read_text() == "the licence"
    assert CARD in m.files
    verify(artifact)


def test_neither_card_nor_manifest_names_a_place(carded, artifact_of, tmp_path, monkeypatch):
    artifact = artifact_of("gptq", model=carded)
    for name in (CARD, MANIFEST):
        text = (artifact.folder / name).read_text()
        assert str(carded.parent) not in text
        assert str(Path(CALIBRATION["text"]).parent) not in text
    assert "| calibration | calibrated on 8 sequences of 32 tokens of " in (artifact.folder / CARD).read_text()
    assert artifact.manifest.recipe.model == artifact.manifest.source.model == "carded"
    assert artifact.manifest.recipe.calibration.text == "sample_articles.txt"
    monkeypatch.chdir(carded)
    for i, spelling in enumerate((".", "../carded/")):
        assert convert(spelling, "rtn", out=tmp_path / f"{i}").manifest.source.model == "carded"


@pytest.mark.parametrize(("text", "expected"), [
    ("---\r\nlicense: mit\r\n---\r\nText\r\n---\r\n", {"license": "mit"}),
    ("no front matter\n---\na: b\n---\n", {}),
    ("---\n[broken\n---\n", {}),
    ("---\ndate: 2024-02-30\nlanguage: no\n---\n", {"date": "2024-02-30", "language": "no"}),
    ("---\n? [a, b]\n: c\n---\n", {}),
])  # fmt: skip
def test_front_matter(text, expected):
    assert front_matter(text) == expected


def test_figures_go_into_the_card_when_asked_and_the_artifact_stays_whole(made, tmp_path):
    before = (made.folder / CARD).read_text()
    ended = quantkit("eval-ppl", made.folder, *EVALUATION_FLAGS, "--card", "--json", tmp_path / "report.json")
    assert (ended.code, ended.err) == (0, "")
    measured = read_report(tmp_path / "report.json")
    text = (made.folder / CARD).read_text()
    value = measured.find("perplexity")
    assert f"| carded | perplexity | {value.value:.2f} ± {value.stderr:.2f} |" in text
    assert "Nothing yet" not in text
    # Only what stands between the two lines is new, and the second time nothing.
    assert text.partition("## Measured")[0] == before.partition("## Measured")[0]
    when = (made.folder / CARD).stat().st_mtime_ns
    write_card(open_artifact(made.folder), (measured,))
    assert (made.folder / CARD).stat().st_mtime_ns == when
    assert verify(made.folder).digest == made.digest == measured.model.digest


def test_a_card_that_was_edited_is_left_alone(made):
    path = made.folder / CARD
    path.write_text(path.read_text() + "my own words\n")
    with pytest.raises(ArtifactError, match="leaves it unchanged"):
        write_card(made, (SIZED,))
    assert path.read_text().endswith("my own words\n")


def put_card(ends, made):
    ends()
    write_card(made, (SIZED,))


@pytest.mark.parametrize(("calls", "after"), [(0, False), (0, True), (1, True)])
def test_a_kill_while_the_card_is_replaced_leaves_a_whole_artifact(calls, after, made, tmp_path):
    ends = Ends(Path, "replace", calls, after=after, number=signal.SIGKILL)
    forked(partial(put_card, ends, made), tmp_path / "log").wait(-signal.SIGKILL)
    verify(made.folder)
    measured = "| tiny | file size |" in (made.folder / CARD).read_text()
    assert measured == ((calls, after) != (0, False))
    write_card(open_artifact(made.folder), (SIZED,))
    verify(made.folder)


def test_an_added_file_is_told_and_one_that_engines_may_load_is_an_error(made):
    (made.folder / "picture.png").write_bytes(b"")
    (made.folder / ".cache").mkdir()
    (made.folder / ".cache" / "state.json").write_text("{}")
    ended = succeeds("verify", made.folder)
    assert "note: not in the manifest, so not checked: .cache/state.json, picture.png\n" in ended.out
    for name in ("model-extra.safetensors", "modeling.py", "added_tokens.json"):
        (made.folder / name).write_bytes(b"{}")
        with pytest.raises(ArtifactError, match=f"{name} was added after the conversion"):
            verify(made.folder)
        (made.folder / name).unlink()
