"""The sound inputs: tiny models, artifacts of each format, GGUF files, unfinished work, kept figures."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.folders import REPOSITORY
from bench.fuzz import quantized_bases as quantized
from bench.fuzz.children import Child, run_all, run_in

sys.path.insert(0, str(REPOSITORY / "tests"))  # tiny models and kills are the tests' own

TEXT = REPOSITORY / "quantkit" / "data" / "sample_articles.txt"
CALIBRATION = ["--calibration-text", str(TEXT), "--calibration-sequences", "2", "--calibration-length", "16"]
WINDOWS = ["--text", str(TEXT), "--n-ctx", "16", "--limit", "2"]
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CARD = """---
license: apache-2.0
language: [en, de]
license_link: https://example.org/licence
tags: [text-generation]
date: 2024-02-29
---
# A tiny model
"""
TEMPLATE = "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
OURS = ["--engine", "reference"]
UNFINISHED = ["--method", "gptq", *CALIBRATION]
COMPARE = {
    "variants": [{"method": "rtn", "bits": 4}, {"method": "gguf", "bits": "Q8_0"}],
    "evaluation": {"text": str(TEXT), "n_ctx": 16, "limit": 2, "threads": [1], "probes": ["perplexity", "size"]},
}
ARTIFACTS = {
    "gptq": ["gptq", "--bits", "4", *CALIBRATION],
    "awq": ["awq", *CALIBRATION],
    "nf4": ["nf4"],
    "ctranslate2": ["ctranslate2", "--bits", "int8"],
    "gguf": ["gguf", "--bits", "Q4_K_M"],
    "float": ["float", "--bits", "float32"],
}


def save_source(folder: Path, model_type: str = "llama", shards: bool = False, **changes: Any) -> None:
    """A tiny checkpoint with every file that belongs to one."""
    import torch
    from gguf_files import save_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {
        "vocab_size": 271,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**values, **SIZES, **changes}))
    model.to(torch.float32).save_pretrained(folder, max_shard_size="100KB" if shards else "1GB")
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    )
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE").write_text("All rights are yours.\n")


SOURCES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "sharded": {"shards": True},
    "mistral": {"model_type": "mistral", "tie_word_embeddings": True, "sliding_window": None, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", "head_dim": 16},
    "gpt2": {"model_type": "gpt2", "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1},
}


def figures(folder: Path) -> dict[str, float]:
    """Perplexity and divergence in a report."""
    wanted = ("perplexity", "kld")
    return {m["name"]: m["value"] for m in json.loads(folder.read_text())["measurements"] if m["name"] in wanted}


def clean_figures(bases: Path, name: str) -> dict[str, float]:
    """Those of the sound artifact `name`; of gptq with its source where the name is ``divergence``."""
    return figures(bases / "figures" / f"{name}.json")


def copied(origin: Path, target: Path) -> Path:
    """A copy of a folder that may be damaged."""
    shutil.copytree(origin, target, symlinks=True)
    return target


# What only some kinds need.
NEEDED_BY = {
    "compared": ("kept reports", "table.json"),
    "baseline": ("baseline", "scored positions"),
    "positions": ("scored positions",),
    "unfinished": ("unfinished work",),
    "importance": ("importance file",),
    "gpt-oss": ("quantized sources",),
    **{f"quantized {name}": ("quantized sources",) for name in quantized.NAMES},
    **{f"{name} judged": ("quantkit.json",) for name in ARTIFACTS},
}


def build(folder: Path, jobs: int, kinds: Iterable[str]) -> None:
    """Make what `kinds` need below `folder`, each in a child of its own."""
    kinds = set(kinds)
    for name in ("sources", "quantized", "artifacts", "files", "unfinished", "figures", "work"):
        (folder / name).mkdir(parents=True)
    for stage in (_sources, _made_of_sources, _made_of_artifacts, _made_of_baselines):
        works = {name: work for name, work in stage(folder).items() if kinds & set(NEEDED_BY.get(name, kinds))}
        tasks = ((name, folder / "work" / name, work) for name, work in works.items())
        for name, _, ended in run_all(tasks, jobs, limited=False):
            if ended.status or ended.result.get("code", 0) or ended.result.get("fault"):
                raise RuntimeError(f"the sound input {name} cannot be made: {ended}")


Works = dict[str, Callable[[Child], None]]


def _sources(folder: Path) -> Works:
    def one(name: str) -> Callable[[Child], None]:
        return lambda _child: save_source(folder / "sources" / name, **SOURCES[name])

    def gpt_oss(_child: Child) -> None:
        save_source(folder / "quantized" / "gpt_oss", "gpt_oss", **quantized.GPT_OSS)

    return {name: one(name) for name in SOURCES} | {"gpt-oss": gpt_oss}


def _command(*arguments: object) -> Callable[[Child], None]:
    return lambda child: run_in(child, list(map(str, arguments)))


def _made_of_sources(folder: Path) -> Works:
    model, files = folder / "sources" / "llama", folder / "files"
    works = {
        name: _command("convert", model, "--out", folder / "artifacts" / name, "--method", *method)
        for name, method in ARTIFACTS.items()
    }

    def single(bits: str, name: str, method: str = "gguf") -> Callable[[Child], None]:
        def work(child: Child) -> None:
            method_of = ["--method", method, "--format", "gguf", "--bits", bits]
            run_in(child, ["convert", str(model), "--out", "out", *method_of])
            shutil.copy(next(Path("out").glob("*.gguf")), files / name)

        return work

    def importance(child: Child) -> None:
        run_in(child, ["imatrix", str(model), "--out", str(files / "importance.gguf"), *CALIBRATION])
        _as_older_kind(files / "importance.gguf", files / "importance.dat")

    return works | {
        "f16.gguf": single("F16", "f16.gguf"),
        "q8.gguf": single("Q8_0", "q8.gguf"),
        "k.gguf": single("Q4_K_M", "k.gguf"),
        "mx.gguf": single("mxfp4", "mx.gguf", "rtn"),
        "importance": importance,
        "whole": _command("convert", model, "--out", folder / "unfinished" / "whole", *UNFINISHED),
        "unfinished": lambda _child: _unfinish(folder),
        "compared": _command("run", _comparison(folder), "--out", folder / "compared"),
        **_quantized(folder),
    }


def _quantized(folder: Path) -> Works:
    """Checkpoints that are quantized; those of quantkit lose their manifest."""
    model, made = folder / "sources" / "llama", folder / "quantized"

    def rounded(name: str) -> Callable[[Child], None]:
        def work(child: Child) -> None:
            calibration = CALIBRATION if "gptq" in quantized.ROUNDED[name] else []
            out = ("--out", str(made / name), "--method", *quantized.ROUNDED[name])
            run_in(child, ["convert", str(model), *out, *calibration])
            (made / name / "quantkit.json").unlink()

        return work

    works = {name: rounded(name) for name in quantized.ROUNDED}
    works |= {
        name: _call(quantized.save_with_transformers, model, made / name, s) for name, s in quantized.SAVED.items()
    }
    works |= {
        name: _call(quantized.save_fp8, model, made / name, block) for name, block in quantized.FP8_BLOCKS.items()
    }
    works |= {name: _call(quantized.save_scaled, model, made / name, kinds) for name, kinds in quantized.SCALED.items()}
    works[quantized.MXFP4] = _call(quantized.save_mxfp4, made / "gpt_oss", made / quantized.MXFP4)
    return {f"quantized {name}": work for name, work in works.items()}


def _call(function: Callable[..., object], *arguments: object) -> Callable[[Child], None]:
    return lambda _child: function(*arguments) and None


def _made_of_artifacts(folder: Path) -> Works:
    works = {
        name: _command(
            *judged(folder / "artifacts" / name, "--no-divergence"), "--json", folder / "figures" / f"{name}.json"
        )
        for name in ARTIFACTS
    }

    def baseline(child: Child) -> None:
        source = ("--source", str(folder / "sources" / "llama"))
        run_in(
            child,
            [*judged(folder / "artifacts" / "gptq", *source), "--json", str(folder / "figures" / "divergence.json")],
        )
        shutil.copytree(child.folder / "cache", folder / "baseline")

    made = folder / "quantized"
    groups = _call(quantized.save_groups, made / "compressed", made / "compressed zeros", made / quantized.GROUPS)
    return {f"{name} judged": work for name, work in works.items()} | {
        "baseline": baseline,
        f"quantized {quantized.GROUPS}": groups,
    }


def _made_of_baselines(folder: Path) -> Works:
    def positions(child: Child) -> None:
        from killed import Ends

        from quantkit.evaluation.perplexity import ResumeFile

        shutil.copytree(folder / "baseline", child.folder / "cache")
        Ends(ResumeFile, "write", after=True)()
        run_in(child, judged(folder / "artifacts" / "gptq", "--source", str(folder / "sources" / "llama")))
        child.note(code=0)
        shutil.copytree(child.folder / "cache", folder / "positions")
        assert list((folder / "positions").rglob("*.positions")), child.known

    return {"positions": positions}


def judged(artifact: Path, *arguments: str) -> list[str]:
    """A judgement of an artifact by our own reader."""
    return ["eval-ppl", str(artifact), *OURS, *WINDOWS, *arguments]


def _comparison(folder: Path) -> Path:
    """The recipe of a comparison."""
    path = folder / "files" / "compare.json"  # which is YAML, too
    path.write_text(json.dumps({"model": str(folder / "sources" / "llama"), **COMPARE}))
    return path


def _unfinish(folder: Path) -> None:
    """Kill a conversion after its first block."""
    from killed import Ends

    from quantkit.checkpoints.spool import Spool

    pid = os.fork()
    if pid == 0:
        Ends(Spool, "finish_block", after=True)()
        arguments = [
            "convert",
            str(folder / "sources" / "llama"),
            "--out",
            str(folder / "unfinished" / "out"),
            *UNFINISHED,
        ]
        run_in(Child(folder / "work" / "unfinished"), arguments)
        os._exit(1)
    os.waitpid(pid, 0)
    if not (folder / "unfinished" / "out.partial" / "tensors.journal").is_file():
        raise RuntimeError("no unfinished work was left")


def _as_older_kind(path: Path, to: Path) -> None:
    """The same importance as llama.cpp wrote it before."""
    import gguf

    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    names = [name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")]
    parts = [struct.pack("<i", len(names))]
    for name in names:
        values = tensors[f"{name}.in_sum2"].reshape(-1).astype("<f4")
        parts.append(
            struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 2, len(values)) + values.tobytes()
        )
    to.write_bytes(b"".join(parts))
