"""Headers of GGUF files against literal bytes; files that are damaged or made to harm end in one line each."""

import random
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_files import changed, finished, job_for, save_model, tensors_of, written
from tiny_models import quantkit

from quantkit.conversion.convert import import_gguf
from quantkit.errors import ArtifactError, QuantkitError, RecipeError, UnsupportedError
from quantkit.formats.gguf.header import contents_of, read_header
from quantkit.formats.gguf.imatrix import read_imatrix
from quantkit.formats.gguf.reader import read_file

gguf = pytest.importorskip("gguf")
UP = "blk.1.ffn_up.weight"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 2}
    made = written(job_for(save_model(folder / "model", **sizes), "Q8_0", folder / "out"))
    return Path(shutil.copyfile(made, folder / "tiny.gguf"))


def text(value):
    return struct.pack("<Q", len(value)) + value


def tensor(name, shape, kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def header(tensors=b"", keys=b"", counts=(0, 0), size=4096, magic=b"GGUF", version=3):
    return (magic + struct.pack("<IQQ", version, *counts) + keys + tensors).ljust(size, b"\0")


def test_literal_bytes(tmp_path):
    keys = (
        key(b"a", 2, struct.pack("<H", 700)) + key(b"b", 8, text("é".encode()))
        + key(b"c", 9, struct.pack("<IQ3f", 6, 3, 0.5, -1.0, 2.0))
        + key(b"d", 9, struct.pack("<IQ", 8, 2) + text(b"x") + text(b"yz")) + key(b"e", 7, b"\1")
    )  # fmt: skip
    head = header(tensor(b"one", (5,)) + tensor(b"two", (32, 3), 8, 32), keys, (2, 5), 0)
    start = -(-len(head) // 32) * 32
    whole = head.ljust(start, b"\0") + bytes(32 + 3 * 34)
    path = tmp_path / "file.gguf"
    path.write_bytes(whole)
    found = read_header(path)
    assert found.keys == {"a": 700, "b": "é", "c": [0.5, -1.0, 2.0], "d": ["x", "yz"], "e": True}
    one, two = found.tensors
    assert (one.name, one.type, one.shape, one.start, one.nbytes) == ("one", "F32", (5,), start, 20)
    assert (two.name, two.type, two.shape, two.start, two.nbytes) == ("two", "Q8_0", (3, 32), start + 32, 3 * 34)
    assert (two.rows, two.weights) == (3, 96)
    for length in (0, 3, 10, 40, len(head) - 5, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match=r"file\.gguf"):
            read_header(path)


def test_a_real_file_reads_as_by_gguf(file):
    ours, theirs = read_header(file), gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.keys == fields
    assert [(t.name, t.type, t.shape, t.start, t.nbytes) for t in ours.tensors] == [
        (t.name, t.tensor_type.name, tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes) for t in theirs.tensors
    ]


NUMBER = struct.pack("<I", 1)
LIST = struct.pack("<IQ", 9, 1)  # of one list
TWO = tensor(b"a", (32,)) + tensor(b"b", (32,), offset=128)
DAMAGED = {
    "another magic": (header(magic=b"GGML"), "does not begin with GGUF"),
    "unknown value": (header(keys=key(b"a", 77, NUMBER), counts=(0, 1)), "value type 77"),
    "no tensors' end": (header(counts=(1 << 60, 0)), "entries in a file of 4,096 bytes"),
    "long name": (header(keys=struct.pack("<Q", 1 << 60), counts=(0, 1)), "a text of 1,152,921,504,606,846,976 bytes"),
    "lists in lists": (header(keys=key(b"a", 9, LIST * 9000), counts=(0, 1), size=200_000), "a list of .* type 9"),
    "key twice": (header(keys=2 * key(b"a", 4, NUMBER), counts=(0, 2)), "the key a comes twice"),
    "tensor twice": (header(2 * tensor(b"a", (32,)), counts=(2, 0)), "tensors.* have the same name"),
    "overlap": (header(TWO.replace(struct.pack("<Q", 128), struct.pack("<Q", 64)), counts=(2, 0)), "b is at 64"),
    "huge": (header(tensor(b"a", (1 << 62, 1 << 62, 1 << 62, 1 << 62)), counts=(1, 0)), "ends inside the tensor a"),
    "empty": (header(tensor(b"a", (32, 0)), counts=(1, 0)), r"has the shape \(0, 32\)"),
    "retired type": (header(tensor(b"a", (32,), kind=4), counts=(1, 0)), "a has the tensor type 4, which"),
    "unknown type": (header(tensor(b"a", (32,), kind=43), counts=(1, 0)), "a has the tensor type 43, which quantkit"),
    "torn row": (header(tensor(b"a", (31,), kind=8), counts=(1, 0)), "rows of 31, which Q8_0 cannot hold"),
    "unprintable": (header(tensor(b"\x1b[2J", (32,)), counts=(1, 0)), "unprintable"),
    "no UTF-8": (header(tensor(b"\xff", (32,)), counts=(1, 0)), "utf-8"),
    "no alignment": (header(keys=key(b"general.alignment", 4, struct.pack("<I", 0)), counts=(0, 1)), "a power of two"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_header_is_one_line(damage, tmp_path):
    content, says = DAMAGED[damage]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=says) as refused:
        read_header(path)
    assert str(refused.value).isprintable()


def test_flipped_bytes_end_in_one_line_or_a_right_answer(file, tmp_path):
    content, path, chance = file.read_bytes(), tmp_path / "flipped.gguf", random.Random(20)
    start = read_header(file).tensors[0].start
    refused = 0
    for _ in range(150):
        flipped = bytearray(content)
        for _ in range(chance.choice((1, 1, 3))):
            flipped[chance.randrange(start)] = chance.randrange(256)
        path.write_bytes(flipped if chance.random() < 0.8 else flipped[: chance.randrange(len(flipped))])
        try:
            contents_of(path).to_values()
            for _, rows in read_file(path):
                rows.read(0, 1)
        except QuantkitError:
            refused += 1
    assert refused > 50


def test_lists_of_equal_numbers_mean_the_number(file, tmp_path):
    keys = read_header(file).keys
    names = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    lists = {f"llama__{name.replace('.', '__')}": 2 * [keys[f"llama.{name}"]] for name in names}
    path = changed(file, tmp_path / "lists.gguf", **lists)
    assert read_header(path).keys["llama.attention.head_count"] == [4, 4]
    read, plain = tensors_of(path), tensors_of(file)
    assert all((read[tensor] == value).all() for tensor, value in plain.items())


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"llama__block_count": 10**6}, "block_count is 1000000, not a whole number from 1 to 512"),
        ({"llama__block_count": 500}, r"has keys for 500 blocks, but 21 tensors"),
        ({"llama__block_count": 3}, r"lacks 9 tensors, such as blk\.2\."),
        ({"llama__attention__head_count": 2**32 - 1}, "4294967295 query"),
        ({"llama__attention__head_count_kv": 2**32}, "head_count_kv is not a uint32"),
        ({"llama__attention__head_count": [4, 2]}, r"head_count is \[4, 2\]; quantkit reads it only if"),
        ({"llama__embedding_length": 128}, r"shape \(64,\), but the file's keys require \(128,\)|\(271, 128\)"),
        ({"tokenizer__ggml__tokens": ["a"]}, r"has the shape \(271, 64\), but .* \(1, 64\)"),
        ({"general__architecture": 5}, "general.architecture is 5"),
        ({"split__count": 10**12}, "split.count is 1000000000000"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "eps|epsilon"),
        ({"llama__context_length": 2**40}, "context_length|max_position"),
        ({"tokenizer__ggml__token_type": [True] * 271}, "llama.cpp cannot read its vocabulary: .*token_type"),
        ({"tokenizer__ggml__bos_token_id": -1}, "its bos token is -1 of 271"),
    ],
)
def test_keys_that_do_not_fit_or_that_nobody_reads_are_one_line(keys, says, file, tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python proves the tokenizer")
    path = changed(file, tmp_path / "changed.gguf", **keys)
    ended = quantkit("import", path, "--out", tmp_path / "out")
    assert (ended.code, ended.err.count("\n")) == (1, 1), ended.err
    assert re.match(f"error: .*({says})", ended.err)
    assert [entry.name for entry in tmp_path.iterdir()] == ["changed.gguf"]


def test_equal_tokens_end_a_process_of_their_own(file, tmp_path):
    """llama.cpp aborts for two equal tokens, which transformers reads."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python proves the tokenizer")
    tokens = list(read_header(file).keys["tokenizer.ggml.tokens"])
    tokens[-1] = tokens[-2]
    path = changed(file, tmp_path / "equal.gguf", tokenizer__ggml__tokens=tokens)
    with pytest.raises(UnsupportedError, match="cannot read its vocabulary: it was ended by SIGABRT"):
        import_gguf(path, tmp_path / "out")


def test_a_config_that_is_given_and_no_config_is_refused(file, tmp_path):
    config = tmp_path / "config.json"
    for content in ("[1]", '{"model_type": 5}'):
        config.write_text(content)
        with pytest.raises(RecipeError, match=r"config\.json"):
            import_gguf(file, tmp_path / "out", config=config)


def imatrix(path, **tensors):
    writer = gguf.GGUFWriter(path, "", use_temp_file=False)
    for name, values in tensors.items():
        writer.add_tensor(f"{UP}.{name}", np.asarray(values))
    return finished(writer, path)


SUMS = np.ones((1, 64), np.float32)
COUNT = np.full((1, 1), 8, np.float32)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"in_sum2": SUMS}, "no .*counts of F32"),
        ({"in_sum2": SUMS, "counts": np.ones((1, 5), np.float32)}, "5 counts of 64 sums"),
        ({"in_sum2": SUMS, "counts": COUNT * np.nan}, "counts of tokens"),
        ({"in_sum2": np.ones((2, 64), np.float32), "counts": np.array([[0.0], [8.0]], np.float32)}, "over no tokens"),
        ({"in_sum2": -SUMS, "counts": COUNT}, "NaN, infinite or neg"),
        ({"counts": COUNT}, "has no importance"),
    ],
)  # fmt: skip
def test_an_importance_file_that_cannot_be_is_refused(tensors, says, tmp_path):
    with pytest.raises(RecipeError, match=rf"^imatrix_file: .*{says}"):
        read_imatrix(imatrix(tmp_path / "imatrix.gguf", **tensors))


def test_experts_that_saw_no_token_are_taken(tmp_path):
    sums = np.concatenate([np.zeros((1, 64), np.float32), SUMS])
    counts = np.array([[0.0], [8.0]], np.float32)
    read = read_imatrix(imatrix(tmp_path / "imatrix.gguf", in_sum2=sums, counts=counts))[UP]
    assert (read == sums / 8).all()


def old(calls=2, count=3, name=b"a", entries=1, value=1.0):
    entry = struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, count) + struct.pack("<3f", value, 2, 3)
    return struct.pack("<i", entries) + entries * entry


OLD = {
    "negative count": (old(count=-1), ""),
    "no end": (old(count=2**31 - 1), "cannot be read as an importance file"),
    "twice": (old(entries=2), ""),
    "cut": (old()[:-1], "cannot be read as an importance file"),
    "no calls": (old(calls=0), "'a' is there twice, or has 0 calls"),
    "not a number": (old(value=float("nan")), "NaN, infinite or negative values for a"),
}


@pytest.mark.parametrize("damage", OLD)
def test_an_old_importance_file_is_read_from_its_bytes_or_refused(damage, tmp_path):
    path, (content, says) = tmp_path / "imatrix.dat", OLD[damage]
    path.write_bytes(old() + struct.pack("<i", 7) + struct.pack("<i", 3) + b"abc")
    assert {name: means.tolist() for name, means in read_imatrix(path).items()} == {"a": [[0.5, 1.0, 1.5]]}
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=f"^imatrix_file: .*{says}"):
        read_imatrix(path)
