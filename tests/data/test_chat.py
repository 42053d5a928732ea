import json

import pytest
from gguf_files import TEMPLATE, saved_tokenizer

from quantkit.data.chat import Conversation, parse_lines, parse_plain, render
from quantkit.data.texts import Text, encode, ids_of, load_text
from quantkit.errors import TextError

ASKED = Conversation((("user", "the bath"), ("assistant", "a hat")))


def test_special_tokens_come_from_the_template_alone(tmp_path):
    tokenizer = saved_tokenizer(tmp_path, TEMPLATE)
    assert render(tokenizer, ASKED) == "<s>[user]the bath</s>[assistant]a hat</s>"
    ids = ids_of(tokenizer, Text("two", "", parts=(ASKED, ASKED))).tolist()
    messages = [{"role": role, "content": content} for role, content in ASKED.messages]
    once = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids[: len(once)] == once
    assert (once[0], ids.count(1), once.count(2)) == (1, 2, 2)
    without = saved_tokenizer(tmp_path / "without", TEMPLATE.removeprefix("{{ bos_token }}"))
    assert encode(without, "a")[0] == 1
    assert 1 not in ids_of(without, Text("two", "", parts=(ASKED, ASKED)))
    # Plain texts are read as they are.
    ids = ids_of(tokenizer, Text("both", "", parts=("a bath\n", ASKED)))
    assert tokenizer.decode(ids).replace(" ", "") == "abath\n<s>[user]thebath</s>[assistant]ahat</s>"


@pytest.mark.parametrize(("template", "says"), [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
])  # fmt: skip
def test_whatever_a_template_raises_is_one_error(template, says, tmp_path):
    with pytest.raises(TextError, match="the model's chat template cannot render a conversation of the text") as told:
        render(saved_tokenizer(tmp_path, template), ASKED)
    assert says in str(told.value)


def test_a_text_has_the_same_tokens_on_every_day(tmp_path):
    for number, template in enumerate(("Today is {{ strftime_now('%d %b %Y') }}.", "Today is {{ date_string }}.")):
        template = (
            "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}" + template
        )
        assert render(saved_tokenizer(tmp_path / str(number), template), ASKED) == "Today is 26 Jul 2024."


def test_what_a_bundled_file_says_is_read_and_written_alike():
    plain = "User:\nWhy?\n\nTwo lines.\n\nAssistant:\nBecause.\n\nUser:\nAh.\n\nAssistant:\n- one\n- two"
    first, second = parse_plain(f"{plain}\n\n---\n\nUser:\nHow?\n\nAssistant:\nSo.\n")
    assert first.messages[0] == ("user", "Why?\n\nTwo lines.")
    assert [role for role, _ in first.messages] == ["user", "assistant", "user", "assistant"]
    assert first.plain == plain
    assert second == Conversation((("user", "How?"), ("assistant", "So.")))


def line(*messages):
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in messages], "id": 7})


def test_a_file_of_json_lines_holds_conversations_and_texts(tmp_path):
    file = tmp_path / "mine.jsonl"
    lines = [line(("system", "Be brief."), *ASKED.messages), "", json.dumps({"text": "plain"}), line(*ASKED.messages)]
    file.write_text("\n".join(lines) + "\n")
    text = load_text(str(file), "calibration")
    assert text.parts == (Conversation((("system", "Be brief."), *ASKED.messages)), "plain\n\n", ASKED)
    assert (text.name, text.content, text.bundled) == ("mine.jsonl", file.read_text(), False)
    # Texts alone need no template.
    file.write_text('{"text": "one"}\n{"text": "two\\n"}\n')
    text = load_text(str(file), "evaluation")
    assert (text.content, text.parts) == ("one\n\ntwo\n", ())


@pytest.mark.parametrize(("bad", "says"), [
    ("{", "line 2 of FILE is not valid JSON"),
    ('{"text": 5}', "line 2 of FILE has neither messages nor a text"),
    ('{"messages": [5]}', "line 2 of FILE has an invalid message: 5"),
    (line(("tool", "x")), "Its role must be one of system, user, assistant"),
    (line(("user", [{"type": "image"}])), "its content a text"),
])  # fmt: skip
def test_a_line_that_holds_something_else_is_told_with_its_number(bad, says, tmp_path):
    file = tmp_path / "mine.jsonl"
    with pytest.raises(TextError) as told:
        parse_lines(f"{line(*ASKED.messages)}\n{bad}\n", file)
    assert says.replace("FILE", str(file)) in str(told.value)
