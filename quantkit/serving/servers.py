"""Servers: how each engine's own OpenAI-compatible server is started for an artifact. Data; serve.py runs them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.contracts.model import Subject
from quantkit.errors import RecipeError, UnsupportedError, near_miss

TRANSFORMERS_FORMATS = (None, "gptq", "awq", "rtn", "nf4")


@dataclass(frozen=True)
class Place:
    """Where and how large: address, context in tokens, threads, the interpreter that has the engine, the name."""

    host: str
    port: int
    n_ctx: int
    threads: int
    python: str
    name: str

    @property
    def url(self) -> str:
        """The base of the API."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{self.port}/v1"


@dataclass(frozen=True)
class Command:
    """What starts a server: arguments, and variables that are added to the process environment."""

    arguments: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Server:
    """An engine's server. `modules` is what its interpreter must have; none: we only print how it is started.

    refuses(subject) is the reason why it cannot take a subject, or None.
    """

    name: str
    summary: str
    refuses: Callable[[Subject], str | None]
    command: Callable[[Subject, Place], Command]
    modules: tuple[str, ...] = ()
    install: str = ""


def _only_gguf(subject: Subject) -> str | None:
    return None if subject.method == "gguf" else "it loads GGUF files only"


def _only_folders(subject: Subject) -> str | None:
    if subject.method in TRANSFORMERS_FORMATS:
        return None
    return "it loads checkpoints in transformers' formats only (unquantized, GPTQ, AWQ, NF4)"


def vllm_refuses(subject: Subject) -> str | None:
    """Why vLLM cannot load a subject, or None."""
    if subject.method == "nf4":
        return "vLLM computes bitsandbytes formats on NVIDIA cards only"
    if subject.artifact is not None and subject.method in ("gptq", "rtn"):
        options, bits = subject.artifact.manifest.options, subject.artifact.manifest.recipe.bits
        if options.get("desc_act") or not options.get("sym", True) or bits not in ("4", "8"):
            return "vLLM loads GPTQ files of 4 and 8 bits that are symmetric and have no desc_act"
    return _only_folders(subject)


def _exllama_refuses(subject: Subject) -> str | None:
    if subject.method in ("gptq", "rtn") and subject.artifact is not None:
        return None if subject.artifact.manifest.recipe.bits == "4" else "exllama loads GPTQ files of 4 bits"
    return None if subject.method is None else "exllama loads GPTQ and unquantized checkpoints"


def _llamacpp(subject: Subject, place: Place) -> Command:
    # By default a second request would cut the first one's answer off, and every prompt token's logits be computed.
    return Command(
        (
            *(place.python, "-m", "llama_cpp.server", "--model", str(_file(subject)), "--model_alias", place.name),
            *("--host", place.host, "--port", str(place.port), "--n_ctx", str(place.n_ctx)),
            *("--n_threads", str(place.threads), "--n_threads_batch", str(place.threads)),
            *("--interrupt_requests", "False", "--logits_all", "False"),
        )
    )


def _llama_server(subject: Subject, place: Place) -> Command:
    return Command(
        (
            *("llama-server", "--model", str(_file(subject)), "--alias", place.name, "--host", place.host),
            *("--port", str(place.port), "--ctx-size", str(place.n_ctx), "--threads", str(place.threads)),
        )
    )


def _vllm(subject: Subject, place: Place) -> Command:
    return Command(
        (
            *(place.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(_folder(subject))),
            *("--served-model-name", place.name, "--host", place.host, "--port", str(place.port)),
            *("--max-model-len", str(place.n_ctx), "--dtype", "bfloat16"),
        ),
        {
            "OMP_NUM_THREADS": str(place.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # GiB of keys and values. Without it vLLM wants nearly all memory of a machine without a card, or ends.
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "4"),
        },
    )


def _sglang(subject: Subject, place: Place) -> Command:
    return Command(
        (
            *(place.python, "-m", "sglang.launch_server", "--model-path", str(_folder(subject))),
            *("--served-model-name", place.name, "--host", place.host, "--port", str(place.port)),
            *("--context-length", str(place.n_ctx)),
        )
    )


def _tgi(subject: Subject, place: Place) -> Command:
    kind = {"gptq": "gptq", "rtn": "gptq", "awq": "awq", "nf4": "bitsandbytes-nf4"}.get(subject.method or "")
    return Command(
        (
            *("docker", "run", "--gpus", "all", "--shm-size", "1g", "-p", f"{place.host}:{place.port}:80"),
            *("-v", f"{_folder(subject)}:/model:ro", "ghcr.io/huggingface/text-generation-inference"),
            *("--model-id", "/model", *(("--quantize", kind) if kind else ()), "--max-total-tokens", str(place.n_ctx)),
        )
    )


def _tabbyapi(subject: Subject, place: Place) -> Command:
    folder = _folder(subject)
    return Command(
        (
            *(place.python, "main.py", "--model-dir", str(folder.parent), "--model-name", folder.name),
            *("--host", place.host, "--port", str(place.port), "--max-seq-len", str(place.n_ctx)),
        )
    )


def _folder(subject: Subject) -> Path:
    return subject.folder.resolve()


def _file(subject: Subject) -> Path:
    return subject.weight_files[0].resolve()


SERVERS = {
    server.name: server
    for server in (
        Server(
            "llamacpp",
            "llama-cpp-python's server",
            _only_gguf,
            _llamacpp,
            ("llama_cpp", "uvicorn", "fastapi", "sse_starlette", "starlette_context", "pydantic_settings"),
            "pip install 'quantkit[serve]'",
        ),
        Server(
            "vllm",
            "vLLM's server",
            vllm_refuses,
            _vllm,
            ("vllm",),
            "vLLM needs an environment of its own: pip install vllm there, and give its interpreter with --python",
        ),
        Server("llama-server", "llama.cpp's own server", _only_gguf, _llama_server),
        Server("sglang", "SGLang", _only_folders, _sglang),
        Server("tgi", "Text Generation Inference, in Docker", _only_folders, _tgi),
        Server("tabbyapi", "TabbyAPI, exllama's server, from its folder", _exllama_refuses, _tabbyapi),
    )
}  # fmt: skip


def find_server(name: str) -> Server:
    """Look a server up; raises RecipeError."""
    if name not in SERVERS:
        raise RecipeError(f"unknown server {name!r}.{near_miss(name, SERVERS)} Known: {', '.join(SERVERS)}.")
    return SERVERS[name]


def server_for(subject: Subject, asked: str | None) -> Server:
    """The asked server, or the first that takes the subject; raises RecipeError and UnsupportedError."""
    if asked is not None:
        found = find_server(asked)
        if reason := found.refuses(subject):
            raise UnsupportedError(f"{found.summary} cannot serve {subject.label}: {reason}")
        return found
    for server in SERVERS.values():
        if server.modules and not server.refuses(subject):
            return server
    raise UnsupportedError(
        f"no server that quantkit starts takes {subject.label}. GGUF artifacts are served by llama.cpp; GPTQ, AWQ and "
        "unquantized models by vLLM."
    )
