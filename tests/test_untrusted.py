"""The boundary: whatever a foreign parser raises ends as one error of ours, and little text stays little."""

import resource

import numpy as np
import pytest
from tokenizers.pre_tokenizers import FixedLength

from quantkit.errors import LONGEST, RecipeError, ResourceError, SourceError
from quantkit.system import untrusted
from quantkit.system.untrusted import (
    depth_exceeds,
    parse_json,
    parse_yaml,
    read_object,
    read_text,
    reraise_as,
    silenced,
)

# 400 bytes whose aliases stand for 9^9 values.
BOMB = "a: &a [1,2,3,4,5,6,7,8,9]\n" + "\n".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


class Panic(BaseException):
    """As a Rust library raises it."""


@pytest.mark.parametrize(("raised", "says"), [
    (ValueError("broken at 3.\nmore"), "x.json: broken at 3. Fetch it."),
    (RecursionError(), "x.json: RecursionError. Fetch it."),
    (Panic("index out of bounds"), "x.json: index out of bounds. Fetch it."),
])  # fmt: skip
def test_whatever_is_raised_is_told(raised, says):
    with pytest.raises(SourceError) as caught, reraise_as("x.json", SourceError, "Fetch it."):
        raise raised
    assert str(caught.value) == says


def test_errors_of_ours_and_interruptions_pass():
    for error in (RecipeError("ours"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)) as caught, reraise_as("x", SourceError):
            raise error
        assert caught.value is error


def test_too_little_memory_and_a_real_panic_without_what_it_prints_are_told(capfd):
    with (
        pytest.raises(ResourceError, match=r"x: this process ran out of memory: 1\.00 EiB more were"),
        reraise_as("x", SourceError),
    ):
        np.empty(1 << 60, np.uint8)
    cutter = FixedLength(0)
    with pytest.raises(SourceError, match="chunk size must be non-zero"), reraise_as("x", SourceError), silenced():
        cutter.pre_tokenize_str("abc")
    assert capfd.readouterr().err == ""


def test_a_message_is_one_bounded_line_without_control_characters():
    text = str(RecipeError("a\x1b[31mred\x00\n\n  second \u2028 third" + "x" * 10_000_000 + " Mend it."))
    assert text.startswith("a\\x1b[31mred\\x00 second third")
    assert text.endswith("Mend it.")
    assert len(text) <= LONGEST
    assert text.isprintable()


@pytest.mark.parametrize("text", [r'{"\uDBFF": 1}', r'["\ud83d", "\ude00"]'])
def test_half_a_character_is_no_text(text):
    for form in (text, text.encode()):
        with pytest.raises(SourceError, match="that file is not valid JSON"):
            parse_json(form, "that file", SourceError)
    for plain in (False, True):
        with pytest.raises(RecipeError, match="that text is not valid YAML"):
            parse_yaml(text, "that text", RecipeError, plain=plain)

    # Both halves are one.
    assert parse_json(r'["\ud83d\ude00", "\\ud800"]', "that file", SourceError) == ["\U0001f600", r"\ud800"]


def test_objects_and_texts_are_bounded(tmp_path):
    assert not depth_exceeds({"a": [{"b": 1}]}, 4)
    assert depth_exceeds({"a": [{"b": [1]}]}, 3)
    path = tmp_path / "x.json"
    path.write_text('{"a": ' * 65 + "1" + "}" * 65)
    with pytest.raises(SourceError, match="nested deeper than 64 levels"):
        read_object(path, SourceError)
    path.write_text("[]")
    with pytest.raises(SourceError, match="is not a JSON object"):
        read_object(path, SourceError)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SourceError, match=r"not UTF-8 text \(byte 0\)"):
        read_text(path, SourceError)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(SourceError, match="has 1,099,511,627,776 bytes"):
        read_text(path, SourceError)
    with pytest.raises(SourceError, match="cannot be read"):
        read_text(tmp_path, SourceError)


def test_a_bomb_of_aliases_takes_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for text in (BOMB, "a: &a [*a]"):
        with pytest.raises(RecipeError, match="its aliases stand for more than 100,000 values"):
            parse_yaml(text, "recipe", RecipeError)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_json_and_yaml_that_are_none_and_some_that_is():
    for text in ("[" * 100_000, "", "1" * 5000, "\ud800", b"\xff"):
        with pytest.raises(SourceError, match="that file is not valid JSON"):
            parse_json(text, "that file", SourceError)
    for text in ("[" * 20_000, "a: 2024-02-30", "a: !!python/object:os.x", "\x00"):
        with pytest.raises(RecipeError, match="that text is not valid YAML"):
            parse_yaml(text, "that text", RecipeError)
    assert parse_yaml("a: &x {b: 1}\nc: *x\nd: no", "text", RecipeError) == {"a": {"b": 1}, "c": {"b": 1}, "d": False}
    assert parse_yaml("d: no\ne: 2024-02-30", "text", RecipeError, plain=True) == {"d": "no", "e": "2024-02-30"}


def test_inside(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "up").symlink_to("../b")
    (tmp_path / "a" / "own").symlink_to("file")
    assert not untrusted.inside(tmp_path / "a", tmp_path / "a" / "up")
    (tmp_path / "a" / "circle").symlink_to("circle")
    assert not untrusted.inside(tmp_path / "a", tmp_path / "a" / "circle")
    assert untrusted.inside(tmp_path / "a", tmp_path / "a" / "own")


@pytest.mark.parametrize("value", [0, 11, 1.0, True])
def test_numbers_out_of_range(value):
    with pytest.raises(SourceError, match=r"config: size is .*, not a whole number from 1 to 10"):
        untrusted.whole_number({"size": value}, "size", 1, 10, "config", SourceError)
    assert untrusted.whole_number({}, "size", 1, 10, "config", SourceError) is None
