import numpy as np
import pytest
from gguf_files import saved_tokenizer
from tiny_models import SAMPLE, fails, succeeds

from quantkit import convert
from quantkit.calibration.tokens import draw_tokens, seen_notes
from quantkit.data.texts import Text, bundled_text, ids_of, load_text
from quantkit.errors import TextError
from quantkit.evaluation.protocols import cut
from quantkit.records.recipe import CalibrationSpec

# A long head, as many models give one to every conversation.
HEAD = " ".join(f"rule{number}" for number in range(60))
TEMPLATE = (
    f"<s>{HEAD} " + "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}</s>{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return saved_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


def drawn(tokenizer, text, sequences=8, length=512):
    return draw_tokens(tokenizer, CalibrationSpec(text=str(text), sequences=sequences, length=length), seed=0).entry


def notes(tokenizer, entry, text, limit=None):
    return seen_notes(entry, text, cut(text, tokenizer, "llama.cpp", 512, limit).windows, tokenizer)


def test_sequences_of_a_chat_are_pieces_of_its_conversations_in_the_template(tokenizer):
    spec = CalibrationSpec(text="chat", sequences=4, length=64)
    tokens = draw_tokens(tokenizer, spec, seed=0)
    ids = ids_of(tokenizer, bundled_text("chat", "calibration"))
    pieces = {tuple(ids[at : at + 64].tolist()) for at in range(0, len(ids), 64)}
    assert all(tuple(row) in pieces for row in tokens.ids.tolist())
    assert tokens.entry.text == "quantkit's bundled text chat, calibration part"
    assert tokenizer.decode(ids).startswith(f"<s> {HEAD} [user] Why is the sky blue?")


def test_equal_texts_are_told_with_the_share_that_was_seen(tokenizer):
    text = load_text(str(SAMPLE), "evaluation")
    pieces = len(ids_of(tokenizer, text)) // 512
    (note,) = notes(tokenizer, drawn(tokenizer, SAMPLE, sequences=pieces), text)
    # all but those that begin with the token which gave way to BOS
    assert note.startswith(f"calibrated on the evaluation text, sha256 {text.sha256[:12]}: about 99% of the evaluated")
    (half,) = notes(tokenizer, drawn(tokenizer, SAMPLE, sequences=pieces // 2), text)
    assert 40 <= int(half.split("about ")[1].split("%")[0]) <= 60
    former = drawn(tokenizer, SAMPLE).model_copy(update={"passages": ""})
    (note,) = notes(tokenizer, former, text)
    assert note.endswith(f"sha256 {text.sha256[:12]}: figures on text that a method has seen look too good")
    assert notes(tokenizer, former, Text("a part", text.content[:20_000])) == ()
    assert notes(tokenizer, None, text) == ()


def test_passages_of_another_file_are_told(tokenizer, tmp_path):
    sample = SAMPLE.read_text(encoding="utf-8")
    mine = tmp_path / "mine.txt"
    mine.write_text("Of my own. " * 3000 + sample[20_000:24_000].upper())
    entry = drawn(tokenizer, mine, sequences=len(ids_of(tokenizer, load_text(str(mine), "calibration"))) // 512)
    (note,) = notes(tokenizer, entry, Text("other", sample[18_000:26_000]))
    assert note.startswith("evaluated on text that it was calibrated on: about ")
    assert 35 <= int(note.split("about ")[1].split("%")[0]) <= 55
    assert notes(tokenizer, entry, Text("other", sample[30_000:50_000])) == ()


def test_other_parts_of_the_same_text_are_told_as_such(tokenizer):
    text = load_text(str(SAMPLE), "evaluation")
    ids = ids_of(tokenizer, text)
    far = max(range(100), key=lambda seed: np.random.default_rng(seed).permutation(len(ids) // 512)[0])
    entry = draw_tokens(tokenizer, CalibrationSpec(text=str(SAMPLE), sequences=1, length=512), seed=far).entry
    (note,) = notes(tokenizer, entry, text, limit=2)
    assert note == f"calibrated on the evaluation text, sha256 {text.sha256[:12]}, but on other parts of it"


def test_the_head_that_a_template_gives_every_conversation_does_not_count(tokenizer):
    entry = drawn(tokenizer, "chat", sequences=64)
    judged = load_text("chat", "evaluation")
    assert notes(tokenizer, entry, judged) == ()
    (note,) = notes(tokenizer, entry, bundled_text("chat", "calibration"))
    assert "calibrated on the evaluation text" in note
    plain = Text("as one text", "".join(tokenizer.decode(ids_of(tokenizer, judged))))
    assert len(notes(tokenizer, entry, plain)) == 1  # nothing tells the head from what is said


def test_the_report_of_an_artifact_says_that_it_was_judged_on_its_calibration(tiny_with, tmp_path):
    spec = {"text": str(SAMPLE), "sequences": 8, "length": 128}
    convert(str(tiny_with(num_hidden_layers=1)), "gptq", "4", tmp_path / "out", calibration=spec)
    flags = ("--n-ctx", 128, "--limit", 4, "--threads", 1, "--no-divergence")
    ended = succeeds("eval-ppl", tmp_path / "out", "--text", SAMPLE, *flags)
    assert ended.out.count("note: calibrated on the evaluation text") == 1


def test_a_chat_for_a_model_without_a_template_is_refused_before_any_work(tokenizer, tiny, tmp_path):
    for words in (("convert", tiny, "--method", "gptq", "--calibration-text"), ("eval-ppl", tiny, "--text")):
        assert fails(*words, "chat", says="has no chat template").out == ""
    with pytest.raises(TextError, match=r"the protocol papers would change .*llama.cpp"):
        cut(bundled_text("chat", "evaluation"), tokenizer, "papers", 64)
