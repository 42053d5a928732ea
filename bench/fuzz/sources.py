"""Damage to the files of a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

from bench.fuzz import judges
from bench.fuzz.bases import CALIBRATION, SOURCES, WINDOWS, copied
from bench.fuzz.case import Attack, Case, Change, Kind, json_or_raw
from bench.fuzz.mutations import Damage, json_text, raw_bytes, safetensors_bytes, yaml_text

METHODS: dict[str, list[str]] = {
    "float": ["float", "--bits", "float32"],
    "rtn": ["rtn"],
    "nf4": ["nf4"],
    "gguf": ["gguf", "--bits", "Q8_0"],
    "gguf-k": ["gguf", "--bits", "Q4_K_M"],
    "ctranslate2": ["ctranslate2", "--bits", "int8"],
    "gptq": ["gptq", *CALIBRATION],
    "awq": ["awq", *CALIBRATION],
}
OFTEN = ("float", "float", "float", "rtn", "nf4", "gguf", "gguf-k", "ctranslate2", "gptq", "awq")
CONFIG_KEYS = (
    "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "rope_parameters", "hidden_act", "dtype", "tie_word_embeddings", "attention_bias", "mlp_bias", "bos_token_id",
    "eos_token_id", "pad_token_id", "sliding_window", "layer_types", "n_head", "n_embd", "n_layer",
    "num_local_experts", "num_experts_per_tok",
)  # fmt: skip
TOKENIZER_KEYS = ("model", "normalizer", "decoder", "pre_tokenizer", "post_processor", "added_tokens")
JINJA = (
    "{% for %}", "{{ 1/0 }}", "{% for i in range(10**12) %}x{% endfor %}", "{{ ''.__class__.__mro__ }}",
    "{% include 'a' %}", "{{" * 50_000, "{% raise %}", "{{ 'x' * 10**10 }}",
)  # fmt: skip
PLAIN = ("llama", "llama", "mistral")
SECRET = "the secret of another folder"


def config_text(damage: Damage, data: bytes) -> bytes:
    """A config.json with changes in the keys that matter."""
    if damage.draw.random() < 0.1:
        return raw_bytes(damage, data)
    return json_text(damage, json.loads(data), CONFIG_KEYS)


def tokenizer_text(damage: Damage, data: bytes) -> bytes:
    """A tokenizer.json with changes, more often outside the long lists."""
    if damage.draw.random() < 0.15:
        return raw_bytes(damage, data, 4096)
    return json_text(damage, json.loads(data), TOKENIZER_KEYS)


def template_text(damage: Damage, data: bytes) -> bytes:
    """A damaged template of jinja."""
    if damage.draw.random() < 0.5:
        return raw_bytes(damage, data)
    piece = damage.draw.choice(JINJA)
    damage.notes.append(f"jinja {piece[:40]!r}")
    return data + piece.encode()


def card_text(damage: Damage, data: bytes) -> bytes:
    """A model card with damage in its front matter."""
    import yaml

    _, head, rest = data.split(b"---\n", 2)
    kind = damage.draw.random()
    if kind < 0.2:
        return raw_bytes(damage, data, len(head))
    if kind < 0.3:
        damage.notes.append("dashes")
        return damage.draw.choice(
            (b"---\n" + head, head + b"---\n" + rest, b"---\n---\n" + rest, data.replace(b"\n", b"\r\n"))
        )
    values = json.loads(json.dumps(yaml.safe_load(head), default=str))
    return b"---\n" + yaml_text(damage, values) + b"---\n" + rest


def convert(case: Case, folder: Path, method: str | None = None) -> Attack:
    """A conversion of `folder`, judged by what transformers makes of it."""
    method = method or case.draw.choice(OFTEN)
    arguments = ["convert", str(folder), "--out", "out", "--method", *METHODS[method]]
    if case.draw.random() < 0.05:
        return Attack([*arguments, "--dry-run"])
    return Attack(arguments, lambda: judges.source(folder, case.here / "out", method))


def use(case: Case, folder: Path) -> Attack:
    """A conversion, or now and then a judgement of the source itself."""
    if case.draw.random() < 0.12:
        report = case.here / "report.json"
        arguments = ["eval-ppl", str(folder), "--no-divergence", "--json", str(report), *WINDOWS]
        return Attack(arguments, lambda: judges.judged(folder, report))
    return convert(case, folder)


def of_source(file: str, change: Change, names: tuple[str, ...] = tuple(SOURCES)) -> Kind:
    """A file of a checkpoint."""

    def make(case: Case) -> Attack:
        folder = copied(case.bases / "sources" / case.draw.choice(names), case.here / "model")
        case.rewrite(folder / file, change)
        return use(case, folder)

    return make


def shards(case: Case) -> Attack:
    """One of several weight files, or a file too many or too few."""
    folder = copied(case.bases / "sources" / "sharded", case.here / "model")
    path, other = case.draw.sample(sorted(folder.glob("*.safetensors")), 2)
    kind = case.draw.choice(("bytes", "bytes", "remove", "swap", "copy", "both"))
    case.say(f"{kind} of {path.name}")
    if kind == "bytes":
        case.rewrite(path, safetensors_bytes)
    elif kind == "remove":
        path.unlink()
    elif kind == "swap":
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
    elif kind == "copy":
        path.write_bytes(other.read_bytes())
    else:
        (folder / "model.safetensors").write_bytes(path.read_bytes())
    return use(case, folder)


def links(case: Case) -> Attack:
    """A file of a checkpoint that is a link, a folder, a pipe, or not readable as what it is called."""
    folder = copied(case.bases / "sources" / "llama", case.here / "model")
    name = case.draw.choice(sorted(path.name for path in folder.iterdir()))
    path, outside = folder / name, case.here / "outside"
    outside.mkdir()
    content = path.read_bytes()
    secret = outside / name
    secret.write_bytes(content)
    if name.endswith((".md", "LICENSE")):
        secret.write_bytes(content + SECRET.encode())
    path.unlink()
    kind = case.draw.choice(
        ("outside", "outside", "nothing", "circle", "folder", "pipe", "zero", "socket", "mode", "parent")
    )
    case.say(f"{name} is {kind}")
    if kind == "outside":
        path.symlink_to(secret)
    elif kind == "nothing":
        path.symlink_to(outside / "nothing")
    elif kind == "circle":
        path.symlink_to(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        import socket

        os.chdir(folder)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(name)
        os.chdir(case.here)
    elif kind == "mode":
        path.write_bytes(content)
        path.chmod(0)
    else:
        path.symlink_to(Path("..") / "outside" / name)
    method = case.draw.choice(OFTEN)
    arguments = ["convert", str(folder), "--out", "out", "--method", *METHODS[method]]
    return Attack(
        arguments,
        lambda: judges.keeps_secret(case.here / "out", SECRET) or judges.source(folder, case.here / "out", method),
    )


KINDS: dict[str, Kind] = {
    "config.json": of_source("config.json", config_text),
    "generation_config.json": of_source("generation_config.json", json_or_raw, PLAIN),
    "tokenizer.json": of_source("tokenizer.json", tokenizer_text, PLAIN),
    "tokenizer_config.json": of_source("tokenizer_config.json", json_or_raw, PLAIN),
    "special_tokens_map.json": of_source("special_tokens_map.json", json_or_raw, PLAIN),
    "chat_template.jinja": of_source("chat_template.jinja", template_text, PLAIN),
    "model.safetensors": of_source("model.safetensors", safetensors_bytes, (*PLAIN, "gpt2", "mixtral")),
    "shards": shards,
    "index.json": of_source("model.safetensors.index.json", json_or_raw, ("sharded",)),
    "README.md": of_source("README.md", card_text, PLAIN),
    "links": links,
}
