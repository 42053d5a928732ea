"""Damage to files that are given by name: GGUF and importance files, recipes, texts; and to the command line itself."""

from __future__ import annotations

import yaml

from bench.fuzz import judges
from bench.fuzz.bases import CALIBRATION, TEXT, WINDOWS, copied
from bench.fuzz.case import Attack, Case, Kind
from bench.fuzz.gguf_damage import gguf_bytes
from bench.fuzz.mutations import LONG, YAML_RAW, Damage, raw_bytes, yaml_text

WORDS = (
    "", " ", "-", "--", "[", "{", "]", "a: b", "!!int x", "~nobody/x", "-1", "0", "1e400", "inf", "nan", "9" * 400,
    "1" * 5000, "None", "null", "true", "../..", "/", ".", "/dev/null", "/dev/zero", "/proc/self/mem", "a\nb",
    "\x1b[31m", "é" * 300, LONG, "<b>", "[red]x[/red]", "[/]", "&a [*a, *a]", "2024-02-30", "1:2:3", "4,4", ",",
    "1,x", "cpu", "cuda", "cuda:99", "Q4_K_M", "int8", "\udcff", "16", "64", "auto", "float32", "reference",
    "llamacpp", "1.5", "0x10", "1_000", "NaN", "model", "out", "text",
)  # fmt: skip
OPTIONS = {
    "convert": (
        "--bits", "--format", "--seed", "--revision", "--out", "--calibration-text", "--calibration-sequences",
        "--calibration-length", "--device", "--offload-gb", "--max-memory-gb", "--json", "--group-size", "--desc-act",
        "--sym", "--damp-percent", "--imatrix-file", "--target-size", "--target-bpw", "--split-max-size",
        "--tensor-type", "--rounding", "--compute-dtype", "--method", "--force", "--dry-run",
    ),
    "eval-ppl": (
        "--text", "--protocol", "--n-ctx", "--limit", "--engine", "--dtype", "--python", "--device", "--revision",
        "--source", "--json", "--card", "--cross-check",
    ),
    "eval": ("--probes", "--threads", "--text", "--n-ctx", "--limit", "--new-tokens", "--json", "--engine"),
    "compare": ("--methods", "--out", "--text", "--limit", "--threads", "--price-per-hour", "--seed", "--json"),
    "run": ("--out", "--json", "--force"),
    "bench": ("--endpoint", "--model", "--api", "--api-key-env", "--prompts", "--duration", "--requests", "--threads"),
    "inspect": ("--tensors", "--json"),
    "verify": ("--json",),
    "imatrix": ("--out", "--calibration-text", "--calibration-sequences", "--seed", "--revision"),
    "import": ("--out", "--dtype", "--tokenizer", "--config", "--force"),
    "eval-tasks": ("--tasks", "--include", "--limit", "--num-fewshot", "--n-ctx", "--engine"),
    "serve": ("--port", "--host", "--engine", "--python"),
    "methods": ("--json",),
    "cache": ("--json",),
    "frobnicate": ("--help",),
}  # fmt: skip
FLAGS = ("--desc-act", "--sym", "--force", "--dry-run", "--card", "--cross-check", "--tensors", "--help")
FEW = {"compare": ["--methods", "rtn", "--threads", "1"], "eval": ["--probes", "size,perplexity", "--threads", "1"]}
ALONE = ("methods", "cache", "frobnicate")


def gguf_file(case: Case) -> Attack:
    """A GGUF file that is imported, converted or looked at."""
    path = case.here / "model.gguf"
    path.write_bytes(
        (case.bases / "files" / case.draw.choice(("f16.gguf", "f16.gguf", "q8.gguf", "k.gguf", "mx.gguf"))).read_bytes()
    )
    case.rewrite(path, gguf_bytes)
    kind = case.draw.choice(("import", "import", "import", "convert", "rtn", "inspect"))
    if kind == "inspect":
        return Attack(["inspect", str(path), "--tensors"], lambda: judges.gguf_header(path))
    out = case.here / "out"
    if kind == "import":
        return Attack(["import", str(path), "--out", "out", "--dtype", "float32"], lambda: judges.imported(path, out))
    if kind == "rtn":
        return Attack(["convert", str(path), "--method", "rtn", "--out", "out"], lambda: judges.gguf_runs(path))
    return Attack(
        ["convert", str(path), "--method", "float", "--bits", "float32", "--out", "out"],
        lambda: judges.imported(path, out),
    )


def imatrix_file(case: Case) -> Attack:
    """An importance file, of the kind of today or the older one."""
    name = case.draw.choice(("importance.gguf", "importance.gguf", "importance.dat"))
    path = case.here / name
    path.write_bytes((case.bases / "files" / name).read_bytes())
    case.rewrite(path, gguf_bytes if name.endswith("gguf") else lambda damage, data: raw_bytes(damage, data, 256))
    model, out = case.bases / "sources" / "llama", case.here / "out"
    arguments = [
        "convert",
        str(model),
        "--method",
        "gguf",
        "--bits",
        "Q4_K_M",
        "--imatrix-file",
        str(path),
        "--out",
        "out",
    ]
    return Attack(arguments, lambda: judges.weighted(path, out))


def recipe(case: Case) -> Attack:
    """A recipe of YAML."""
    model = str(case.bases / "sources" / "llama")
    values: dict[str, object] = {
        "model": model,
        "method": case.draw.choice(("rtn", "gptq", "gguf")),
        "options": {"group_size": 32} if case.draw.random() < 0.5 else {},
        "calibration": {"text": str(TEXT), "sequences": 2, "length": 16},
        "seed": 3,
        "out": "out",
    }
    if case.draw.random() < 0.3:
        variants = [{"method": "rtn", "bits": 4, "options": {"group_size": 32}}]
        evaluation = {"text": str(TEXT), "n_ctx": 16, "limit": 2, "threads": [1], "probes": ["perplexity"]}
        values = {"model": model, "variants": variants, "evaluation": evaluation, "out": "out"}
    elif values["method"] == "gguf":
        values |= {"bits": "Q8_0", "options": {}}
    case.damage.raws = (*case.damage.raws, *YAML_RAW, *YAML_RAW)

    def change(damage: Damage, data: bytes) -> bytes:
        return raw_bytes(damage, data) if damage.draw.random() < 0.15 else yaml_text(damage, values)

    path = case.here / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    case.rewrite(path, change)
    return Attack(["run", str(path)], lambda: judges.recipe(path, case.here))


def text(case: Case) -> Attack:
    """A text for calibration or evaluation."""
    path = case.here / "text.txt"
    data = TEXT.read_bytes()[:4000]
    path.write_bytes(data)
    kind = case.draw.choice(("raw", "raw", "nul", "word", "lines", "blank", "marks", "surrogate", "controls", "short"))
    case.say(kind)
    made = {
        "nul": bytes(1000),
        "word": b"a" * 5000,
        "lines": b"\n" * 1000,
        "blank": b" \t\xc2\xa0" * 200,
        "marks": b"<s></s><unk>" * 3000,
        "surrogate": data[:100] + b"\xed\xa0\x80" + data,
        "controls": bytes(range(1, 32)) * 20,
        "short": data[: case.draw.randrange(60)],
    }
    case.rewrite(path, raw_bytes if kind == "raw" else lambda _damage, _data: made[kind])
    model = str(case.bases / "sources" / "llama")
    if case.draw.random() < 0.5:
        arguments = ["eval-ppl", model, "--no-divergence", "--text", str(path), *WINDOWS[2:]]
        if case.draw.random() < 0.5:
            arguments += ["--protocol", case.draw.choice(("papers", "lm-eval"))]
    else:
        arguments = [
            "convert",
            model,
            "--method",
            "gptq",
            "--out",
            "out",
            "--calibration-text",
            str(path),
            *CALIBRATION[2:],
        ]
    return Attack(arguments, lambda: judges.text(path))


def command_line(case: Case) -> Attack:
    """Words that nobody expects, in place of values."""
    draw = case.draw
    name = draw.choice((*OPTIONS, "convert", "convert", "convert", "eval-ppl", "eval"))
    model = copied(case.bases / "sources" / "llama", case.here / "model")
    artifact = copied(case.bases / "artifacts" / "gptq", case.here / "artifact")
    subject = str(draw.choice((model, artifact)))
    if name == "serve":  # of what can be served only the refusals end
        subject = draw.choice(("nowhere", str(model / "LICENSE"), "a\nb"))
    elif name in ("run", "import"):
        subject = str(draw.choice((model / "LICENSE", case.bases / "files" / "q8.gguf")))
    if draw.random() < 0.2:
        subject = draw.choice(WORDS)
    if subject == "demo":
        subject = "./demo"
    arguments = [name] if name in ALONE or (name == "bench" and draw.random() < 0.5) else [name, subject]
    if name == "convert":
        arguments += ["--method", draw.choice(("rtn", "gptq", "awq", "nf4", "gguf", "ctranslate2", "float"))]
        arguments += [*CALIBRATION, *([] if draw.random() < 0.3 else ["--out", "out"])]
    elif name in ("eval-ppl", "eval", "compare"):
        arguments += [*WINDOWS, *FEW.get(name, [])]
    elif name == "bench":
        arguments += [
            "--endpoint",
            "http://127.0.0.1:9/v1",
            "--model",
            "m",
            "--duration",
            "0.2",
            "--requests",
            "1",
            "--warm-up",
            "0",
        ]
    elif name in ("imatrix", "import"):
        arguments += ["--out", "out", *(CALIBRATION if name == "imatrix" else [])]
    elif name == "eval-tasks":
        arguments += ["--tasks", draw.choice(WORDS)]
    for _ in range(draw.choice((1, 1, 2))):
        option = draw.choice(OPTIONS[name])
        word = draw.choice(WORDS)
        arguments += [option] if option in FLAGS else [option, word] if draw.random() < 0.8 else [f"{option}={word}"]
    if draw.random() < 0.05:
        arguments.insert(draw.randrange(1, len(arguments) + 1), draw.choice(WORDS))
    arguments = [part.replace("\0", "") for part in arguments]
    case.say("arguments")
    return Attack(arguments)


KINDS: dict[str, Kind] = {
    "GGUF file": gguf_file,
    "importance file": imatrix_file,
    "recipe": recipe,
    "text": text,
    "command line": command_line,
}
