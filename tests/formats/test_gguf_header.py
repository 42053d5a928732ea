"""Headers of GGUF files against literal bytes, against gguf's own reader, and cut or spoiled."""

import struct

import pytest
from gguf_files import job_for, save_model, written

from quantkit.errors import ArtifactError
from quantkit.formats.gguf.header import read_header

gguf = pytest.importorskip("gguf")


def text(value):
    return struct.pack("<Q", len(value)) + value


KEYS = (
    text(b"a") + struct.pack("<IH", 2, 700)
    + text(b"b") + struct.pack("<I", 8) + text("é".encode())
    + text(b"c") + struct.pack("<IIQ3f", 9, 6, 3, 0.5, -1.0, 2.0)
    + text(b"d") + struct.pack("<IIQ", 9, 8, 2) + text(b"x") + text(b"yz")
    + text(b"e") + struct.pack("<I?", 7, True)
)  # fmt: skip
TENSORS = (
    text(b"one") + struct.pack("<IQIQ", 1, 5, 0, 0)
    + text(b"two") + struct.pack("<IQQIQ", 2, 32, 3, 8, 32)
)  # fmt: skip
HEAD = b"GGUF" + struct.pack("<IQQ", 3, 2, 5) + KEYS + TENSORS
START = -(-len(HEAD) // 32) * 32
WHOLE = HEAD.ljust(START, b"\0") + bytes(32 + 3 * 34)


def test_literal_bytes(tmp_path):
    (tmp_path / "file.gguf").write_bytes(WHOLE)
    header = read_header(tmp_path / "file.gguf")
    assert header.keys == {"a": 700, "b": "é", "c": [0.5, -1.0, 2.0], "d": ["x", "yz"], "e": True}
    one, two = header.tensors
    assert (one.name, one.type, one.shape, one.start, one.nbytes) == ("one", "F32", (5,), START, 20)
    assert (two.name, two.type, two.shape, two.start, two.nbytes) == ("two", "Q8_0", (3, 32), START + 32, 3 * 34)
    assert (two.rows, two.weights) == (3, 96)


@pytest.mark.parametrize("length", [0, 3, 10, 40, len(HEAD) - 5, len(WHOLE) - 1])
def test_cut_files_are_refused(tmp_path, length):
    (tmp_path / "cut.gguf").write_bytes(WHOLE[:length])
    with pytest.raises(ArtifactError, match=r"cut\.gguf"):
        read_header(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GGML" + WHOLE[4:], "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + WHOLE[8:], "version 1"),
        (b"GGUF" + struct.pack("<IQ", 3, 1 << 60) + WHOLE[16:], "entries in"),
        (WHOLE.replace(text(b"yz"), struct.pack("<Q", 1 << 50) + b"yz"), "a text of"),
        (WHOLE.replace(struct.pack("<IQQIQ", 2, 32, 3, 8, 32), struct.pack("<IQQIQ", 2, 33, 3, 8, 32)), "rows of 33"),
        (WHOLE.replace(struct.pack("<IQQIQ", 2, 32, 3, 8, 32), struct.pack("<IQQIQ", 9, 32, 3, 8, 32)), "9 dimensions"),
        (WHOLE.replace(struct.pack("<I?", 7, True), struct.pack("<I?", 77, True)), "value type 77"),
    ],
)
def test_spoiled_files_are_refused(tmp_path, content, says):
    (tmp_path / "spoiled.gguf").write_bytes(content)
    with pytest.raises(ArtifactError, match=says):
        read_header(tmp_path / "spoiled.gguf")


def test_a_real_file_reads_as_by_gguf(tmp_path):
    path = written(job_for(save_model(tmp_path / "model", num_hidden_layers=2), "Q4_K_M", tmp_path / "out"))
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.keys == fields
    assert [(t.name, t.type, t.shape, t.start, t.nbytes) for t in ours.tensors] == [
        (t.name, t.tensor_type.name, tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes) for t in theirs.tensors
    ]
