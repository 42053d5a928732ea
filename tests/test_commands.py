"""Every `quantkit` command of the README and the pages is run as written.

`demo` is a small model here: with the real one the commands would take hours.
"""

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from gguf_files import TEMPLATE, save_model
from test_docs import RUNNABLE, commands
from tiny_adapters import low_rank, save_adapter
from tiny_models import SAMPLE, save_tiny

from quantkit import convert
from quantkit.data.demo import FOLDER as DEMO
from quantkit.system.files import cache_folder

ROOT = Path(__file__).parents[1]
QUANTKIT = str(Path(sys.executable).parent / "quantkit")
# Words of commands that are not run, and why.
NOT_RUN = {
    "eval-tasks": "the harness fetches the tasks' questions from the hub; tests/evaluation/test_tasks.py runs its own",
    "ray": "needs a cluster; tests/comparison/test_executors.py begins one",
    "eager": "the engine that the page's reader adds; tests/test_docs.py adds it",
    "cuda": "needs a GPU; bench/gpu.py is for that",
    "cuda:1": "needs two GPUs",
    "--create": "needs the hub; tests/publishing has a server of its own",
    "--results": "needs the hub",
    "vllm": "needs an environment of its own; `make bench-vllm` runs it",
}
BLOCKS = 2
# Artifacts that a page may take for granted, and how they are made if no earlier page has made them.
KNOWN = {
    "demo-gptq": ("gptq", "4"),
    "demo-awq": ("awq", "4"),
    "demo-gguf": ("gguf", "Q4_K_M"),
    "demo-float16": ("float", "float16"),
}
SMALLER = {"90MB": "1MB"}  # what the pages ask for is the demo model's
HEALTH = "http://127.0.0.1:8000/v1/models"


def asked():
    seen = set()
    for page in RUNNABLE:
        for words in commands(page.read_text(encoding="utf-8")):
            if words[0] == "quantkit" and tuple(words) not in seen:
                seen.add(tuple(words))
                yield page.relative_to(ROOT).as_posix(), words[1:]


def prepare(folder, words):
    """Make what the pages say that the user has, and remove what an earlier page has made."""
    if "my-text.txt" in words:
        text = SAMPLE.read_text(encoding="utf-8")
        (folder / "my-text.txt").write_text(text * 12 if "--calibration-text" in words else text, encoding="utf-8")
    if "model.gguf" in words and not (folder / "model.gguf").exists():
        small = save_tiny(folder.parent / "small")  # transformers rebuilds the demo's tokenizer otherwise than it was
        made = convert(str(small), "gguf", "Q8_0", folder.parent / "small-gguf")
        shutil.copy(next(made.folder.glob("*.gguf")), folder / "model.gguf")
        (folder / "tokenizer-folder").mkdir()
        for path in small.glob("*token*"):
            shutil.copy(path, folder / "tokenizer-folder")
    if "laptop=laptop/table.json" in words:
        (folder / "laptop").mkdir()
        shutil.copy(folder / "sweep-output" / "table.json", folder / "laptop")
    for seed, adapter in enumerate(word for word in words if word.endswith("-lora")):
        if not (folder / adapter).exists():
            model = cache_folder() / DEMO
            paths = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(BLOCKS) for part in "qv"]
            save_adapter(folder / adapter, low_rank(model, paths, seed=seed))
    if words[0] in ("convert", "import") and "--out" in words:
        shutil.rmtree(folder / words[words.index("--out") + 1], ignore_errors=True)
    if words[0] == "run":
        shutil.rmtree(folder / yaml.safe_load((folder / words[1]).read_text())["out"], ignore_errors=True)
    needed = {"demo-float16"} if "recipes/sweep.yaml" in words else set(words[1:2])
    needed |= {"demo-gguf"} if "my-model" in words else set()
    for name in KNOWN.keys() & needed:
        if not (folder / name).exists():
            convert(str(cache_folder() / DEMO), *KNOWN[name], folder / name)
    if "my-model" in words:
        shutil.copytree(folder / "demo-gguf", folder / "my-gguf")
        (folder / "my-model").symlink_to(cache_folder() / DEMO)


def serve(folder, words, log):
    with log.open("w") as said:
        server = subprocess.Popen([QUANTKIT, *words], cwd=folder, stdout=said, stderr=subprocess.STDOUT, text=True)
    for _ in range(120):
        try:
            with urllib.request.urlopen(HEALTH):
                return server
        except OSError:
            time.sleep(1)
            assert server.poll() is None, log.read_text()
    raise AssertionError(log.read_text())


def end(server):
    server.terminate()
    server.wait(60)


@pytest.mark.slow
def test_commands_of_the_pages_run(tmp_path, monkeypatch):
    for name in ("llama_cpp", "xllamacpp"):
        pytest.importorskip(name)
    save_model(tmp_path / "cache" / DEMO, num_hidden_layers=BLOCKS, max_position_embeddings=2048)
    (tmp_path / "cache" / DEMO / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    tmp_path = tmp_path / "here"
    tmp_path.mkdir()
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    servers, run, failed = [], [], []
    try:
        for page, words in asked():
            if any(word in words for word in NOT_RUN):
                continue
            prepare(tmp_path, words)
            words = [SMALLER.get(word, word) for word in words]
            if words[0] == "serve" and "--print" not in words:
                while servers:  # one that an earlier page has started, on the same port
                    end(servers.pop())
                servers.append(serve(tmp_path, words, tmp_path / "server.log"))
                continue
            before, began = set(tmp_path.iterdir()), time.monotonic()
            done = subprocess.run([QUANTKIT, *words], cwd=tmp_path, env=os.environ, capture_output=True, text=True)
            run.append(words)
            print(f"{page}: {' '.join(words)}: {done.returncode}, {time.monotonic() - began:.0f} s", flush=True)
            if done.returncode or "Traceback" in done.stderr:
                failed.append((page, words, done.stderr[-1000:]))
            if words[0] == "convert" and "--out" not in words:  # pages do so more than once
                for made in set(tmp_path.iterdir()) - before:
                    shutil.rmtree(made)
    finally:
        for server in servers:
            end(server)
    assert not failed
    assert len(run) > 30
