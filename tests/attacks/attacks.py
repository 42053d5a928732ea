"""One small attack of each kind, as data: what is damaged how, what the command is, and what the answer has to name."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.fuzz.gguf_damage import Value, dump, parse
from bench.fuzz.mutations import parts_of

Change = Callable[[bytes], bytes]
DEEP = 100_000
NAN = struct.pack("<f", math.nan)
RTN = ("convert", "model", "--out", "out", "--method", "rtn")
GGUF = ("convert", "model", "--out", "out", "--method", "gguf", "--bits", "Q8_0")
WEIGHTED = ("convert", "model", "--out", "out", "--method", "gguf", "--imatrix-file", "importance.gguf")
IMPORT = ("import", "model.gguf", "--out", "out")
VERIFY = ("verify", "artifact")
RUN = ("run", "recipe.yaml")


@dataclass(frozen=True)
class Attack:
    """`change` makes of a file's bytes those that the command meets; `says` are parts of the one line that answers."""

    name: str
    file: str
    change: Change
    command: tuple[str, ...] = RTN
    says: tuple[str, ...] = ()


def whole(text: str | bytes) -> Change:
    """Other content."""
    return lambda _data: text.encode() if isinstance(text, str) else text


def key(*path: str | int, to: Any) -> Change:
    """Another value at a place of a JSON file."""

    def change(data: bytes) -> bytes:
        values = json.loads(data)
        holder = values
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = to
        return json.dumps(values).encode()

    return change


def entry(name: str, at: str, to: Any) -> Change:
    """Another value in the header of a safetensors file."""

    def change(data: bytes) -> bytes:
        header, tensors = parts_of(data)
        header[name][at] = to
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + tensors

    return change


def gguf_key(name: str, to: Any, kind: int | None = None) -> Change:
    """Another value, or type, of a key of a GGUF file."""

    def change(data: bytes) -> bytes:
        file = parse(data)
        assert any(known == name.encode() for known, _ in file.keys)
        file.keys = [
            (known, Value(value.type if kind is None else kind, to, value.inner) if known == name.encode() else value)
            for known, value in file.keys
        ]
        return dump(file)

    return change


def gguf_tensor(at: int, part: int, to: Any) -> Change:
    """Another name (0), shape (1), type (2) or offset (3) of a tensor of a GGUF file."""

    def change(data: bytes) -> bytes:
        file = parse(data)
        file.tensors[at][part] = to(file) if callable(to) else to
        return dump(file)

    return change


def bomb() -> str:
    """YAML of 400 bytes whose aliases stand for 9^9 values."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    return "\n".join(lines)


UP = "model.layers.0.mlp.up_proj.weight"
CONFIG = "model/config.json"
FILE = "model.safetensors"
WEIGHTS = f"model/{FILE}"
MANIFEST = "artifact/quantkit.json"
JUDGE = ("eval-ppl", "model", "--text", "text.txt")
TOKENIZER = "model/tokenizer.json"
ATTACKS = (
    # config.json
    Attack("JSON nested without end", CONFIG, whole('{"a":' * DEEP + "1" + "}" * DEEP), says=("config.json",)),
    Attack("a billion layers", CONFIG, key("num_hidden_layers", to=10**9), says=("num_hidden_layers",)),
    Attack("fewer layers than weights", CONFIG, key("num_hidden_layers", to=1), says=("config.json", "layers.1")),
    Attack("no heads", CONFIG, key("num_attention_heads", to=0), says=("num_attention_heads",)),
    Attack("2^62 heads", CONFIG, key("num_attention_heads", to=2**62), says=("num_attention_heads",)),
    Attack("2^62 channels", CONFIG, key("hidden_size", to=2**62), says=("hidden_size",)),
    Attack("a context of -1", CONFIG, key("max_position_embeddings", to=-1), GGUF, ("max_position_embeddings",)),
    Attack("a context of 10^18", CONFIG, key("max_position_embeddings", to=10**18), GGUF, ("max_position_embeddings",)),
    Attack("architectures is a number", CONFIG, key("architectures", to=5), says=("architectures",)),
    Attack("rope_parameters is a number", CONFIG, key("rope_parameters", to=5), says=("rope_parameters",)),
    Attack("an infinite eps", CONFIG, key("rms_norm_eps", to=math.inf), says=("rms_norm_eps",)),
    Attack("theta is NaN", CONFIG, key("rope_parameters", "rope_theta", to=math.nan), says=("rope_theta",)),
    Attack("shapes of another config", CONFIG, key("intermediate_size", to=191), GGUF, ("191",)),
    # safetensors
    Attack("a header of 2^63 bytes", WEIGHTS, lambda d: struct.pack("<Q", 2**63) + d[8:], says=(FILE,)),
    Attack("an infinite shape", WEIGHTS, entry(UP, "shape", [math.inf, 2]), says=(FILE, "Infinity")),
    Attack("infinite offsets", WEIGHTS, entry(UP, "data_offsets", [0, math.inf]), says=(FILE, "Infinity")),
    Attack("tensors in the same bytes", WEIGHTS, entry(UP, "data_offsets", [0, 256 * 64 * 2]), says=(FILE,)),
    Attack("whole numbers as weights", WEIGHTS, entry(UP, "dtype", "I16"), says=(UP, "I16")),
    Attack("an index beside one file", "model/model.safetensors.index.json", whole('{"weight_map": {}}'), says=(FILE,)),
    # the tokenizer
    Attack("a tokenizer of null", TOKENIZER, whole("null"), says=("tokenizer",)),
    Attack("a tokenizer in UTF-16", TOKENIZER, lambda d: d.decode().encode("utf-16"), says=("tokenizer",)),
    Attack("a normalizer of nothing", TOKENIZER, key("normalizer", to={"type": "None"}), says=("tokenizer",)),
    Attack("a decoder of nothing", TOKENIZER, key("decoder", to={}), says=("tokenizer",)),
    Attack("a negative id", TOKENIZER, key("model", "vocab", "a", to=-1), says=("tokenizer",)),
    Attack("an id beyond the embedding", TOKENIZER, key("model", "vocab", "a", to=5000), says=("5000",)),
    Attack("settings in a list", "model/tokenizer_config.json", whole("[]"), says=("tokenizer",)),
    Attack("a class of 5", "model/tokenizer_config.json", key("tokenizer_class", to=5), says=("tokenizer",)),
    Attack("a template of 5", "model/tokenizer_config.json", key("chat_template", to=5), says=("template",)),
    Attack("special tokens in a list", "model/special_tokens_map.json", whole("[]"), says=("special_tokens_map",)),
    # GGUF files
    Attack("a million blocks", "model.gguf", gguf_key("llama.block_count", 10**6), IMPORT, ("block_count",)),
    Attack("blocks in words", "model.gguf", gguf_key("llama.block_count", b"two", 8), IMPORT, ("model.gguf",)),
    Attack("equal tokens", "model.gguf", gguf_key("tokenizer.ggml.tokens", [b"x"] * 271), IMPORT, ("model.gguf",)),
    Attack("tensors that overlap", "model.gguf", gguf_tensor(1, 3, lambda f: f.tensors[2][3]), IMPORT, ("model.gguf",)),
    Attack("a shape of 2^62", "model.gguf", gguf_tensor(0, 1, [2**62, 2**62]), IMPORT, ("model.gguf",)),
    Attack("an unknown type", "model.gguf", gguf_tensor(0, 2, 99), ("inspect", "model.gguf"), ("model.gguf",)),
    # importance files
    Attack("importance of nothing", "importance.gguf", lambda d: d[:-64] + NAN * 16, WEIGHTED, ("importance.gguf",)),
    Attack("importance that is cut", "importance.gguf", lambda d: d[: len(d) // 2], WEIGHTED, ("importance.gguf",)),
    # artifacts
    Attack("another method", MANIFEST, key("recipe", "method", to="nf4"), VERIFY, ("nf4",)),
    Attack("the manifest counts other types", MANIFEST, key("tensor_types", to={"F32": 1}), VERIFY),
    Attack("a manifest without files", MANIFEST, key("files", to={}), VERIFY, ("quantkit.json",)),
    Attack("a flipped bit", f"artifact/{FILE}", lambda d: d[:-1] + bytes([d[-1] ^ 1]), VERIFY, ("corrupted",)),
    # recipes
    Attack("a day that is none", "recipe.yaml", lambda d: d + b"seed: 2024-02-30\n", RUN, ("recipe.yaml",)),
    Attack("aliases that multiply", "recipe.yaml", lambda d: d + bomb().encode(), RUN, ("recipe.yaml",)),
    Attack("a NUL in a path", "recipe.yaml", lambda d: d + b'out: "a\\0b"\n', RUN, ("out",)),
    Attack("a number that is none", "recipe.yaml", lambda d: d + b"seed: !!int x\n", RUN, ("recipe.yaml",)),
    # the command line
    Attack("a bracket for a size", CONFIG, bytes, (*RTN, "--group-size", "["), ("--group-size",)),
    Attack("an infinite limit", CONFIG, bytes, (*RTN, "--offload-gb", "inf"), ("offload_gb",)),
    Attack("a seed below zero", CONFIG, bytes, (*RTN, "--seed", "-1"), ("seed",)),
    Attack("nobody's home", CONFIG, bytes, ("convert", "~nobody-at-all/x", "--method", "rtn"), ("~nobody-at-all/x",)),
    Attack("a size of 400 nines", CONFIG, bytes, (*GGUF, "--split-max-size", "9" * 400), ("split_max_size",)),
    # texts
    Attack("a text in UTF-16", "text.txt", lambda d: d.decode().encode("utf-16"), JUDGE, ("text.txt",)),
    Attack("an empty text", "text.txt", whole(""), JUDGE, ("text.txt",)),
)  # fmt: skip


# What must not stop a conversion, nor end up in it.
HARMLESS = (
    Attack("a day that is none in the card", "model/README.md", whole("---\nlicense: mit\ndate: 2024-02-30\n---\n")),
    Attack("a card nested without end", "model/README.md", whole("---\na: " + "[" * DEEP + "\n---\n")),
    Attack("an unfinished work of nothing", "out.partial/work.json", whole("[1]")),
    Attack("an unfinished work that is no JSON", "out.partial/work.json", whole(b"\xff\xfe")),
    Attack("an unfinished work nested without end", "out.partial/work.json", whole("[" * DEEP)),
)


def place(attack: Attack, sound: Path, here: Path) -> None:
    """Put what the command needs into `here`, with the damage."""
    shutil.copytree(sound, here, dirs_exist_ok=True)
    path = here / attack.file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(attack.change(path.read_bytes() if path.is_file() else b""))
