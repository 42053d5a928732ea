import os
import subprocess
import sys

import pytest
from edits import edit_json, put
from gguf_files import save_tokenizer
from tiny_models import SAMPLE
from wikitext_hub import ROWS, files_of, wikitext_hub

from quantkit.data.texts import SECTIONS, adds_bos, encode, first_token, load_text, sample_text
from quantkit.models.config import load_tokenizer

LOADED = """
import sys
from quantkit.data.texts import load_text
for split in sys.argv[1:]:
    text = load_text(None, split)
    print(repr((text.name, text.content, text.bundled)))
"""


@pytest.mark.usefixtures("no_hub")
def test_the_parts_of_the_sample_are_apart_and_in_their_places_and_taken_without_a_hub():
    articles = SAMPLE.read_text(encoding="utf-8")
    folder = SAMPLE.with_name("kinds")
    kinds = "".join((folder / f"{kind}_calibration.txt").read_text(encoding="utf-8") for kind in SECTIONS)
    calibration, evaluation = sample_text("calibration"), sample_text("evaluation")
    assert calibration.content.endswith(kinds)
    assert calibration.content.removesuffix(kinds) + evaluation.content == articles
    assert [load_text(None, split) for split in ("calibration", "evaluation")] == [calibration, evaluation]


def loaded(endpoint, cache, *splits):
    """Load texts in a process whose hub that is; huggingface_hub reads the variable when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    env = {**kept, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-c", LOADED, *splits]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_calibration_has_the_hub_s_train_split_and_evaluation_its_test_split(tmp_path):
    pytest.importorskip("datasets")
    with wikitext_hub(files_of("text")) as url:
        done = loaded(url, tmp_path, "calibration", "evaluation")
    assert done.returncode == 0, done.stderr
    wanted = [
        (f"WikiText-2 raw {split}", "".join(row or "\n" for row in ROWS[split]), False) for split in ("train", "test")
    ]
    assert done.stdout.splitlines() == [repr(text) for text in wanted]


@pytest.mark.parametrize(
    "files",
    [pytest.param({}, id="no data set"), pytest.param(files_of("words"), id="no column text", marks=pytest.mark.slow)],
)
def test_a_hub_without_it_is_told(files, tmp_path):
    pytest.importorskip("datasets")
    with wikitext_hub(files) as url:
        done = loaded(url, tmp_path, "calibration")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("quantkit.errors.TextError: WikiText-2 could not be loaded from the hub: ")
    assert last.endswith("Give a file with --calibration-text.")


def tokenizer_in(folder, bos=False):
    """A tokenizer that has BOS, and puts it first or does not."""
    folder.mkdir(exist_ok=True)
    save_tokenizer(folder)
    if not bos:
        edit_json(folder / "tokenizer.json", put("post_processor", value=None))
    return load_tokenizer(folder)


def test_whether_a_tokenizer_puts_bos_first_is_seen_in_what_it_gives(tmp_path):
    with_bos, without = tokenizer_in(tmp_path / "bos", bos=True), tokenizer_in(tmp_path / "none")
    assert with_bos.bos_token_id == without.bos_token_id == 1  # that there is one does not say that it is put
    assert adds_bos(with_bos)
    assert not adds_bos(without)
    assert encode(with_bos, "text").tolist() == [1, *encode(without, "text").tolist()]
    # The first token of a page is BOS, or else EOS.
    assert first_token(without) == 1
    without.bos_token = None
    assert not adds_bos(without)
    assert first_token(without) == without.eos_token_id == 2
