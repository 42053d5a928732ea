"""Servers: how each engine's own OpenAI-compatible server is started for an artifact. Data; launch.py runs them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_format
from quantkit.errors import RecipeError, UnsupportedError, near_miss
from quantkit.formats._quantization_config import quantization_of

GGUF = (("gguf",), "it loads GGUF files only")
FOLDERS = (
    ("float", "gptq", "awq", "compressed-tensors", "bitsandbytes"),
    "it loads checkpoints in transformers' formats only (unquantized, GPTQ, AWQ, compressed-tensors, NF4)",
)
EXLLAMA = (("float", "gptq"), "exllama loads GPTQ and unquantized checkpoints")


@dataclass(frozen=True)
class ServerAddress:
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

    `opens` are the formats that it takes, and what it says of others.
    """

    name: str
    summary: str
    opens: tuple[tuple[str, ...], str]
    command: Callable[[Model, ServerAddress], Command]
    modules: tuple[str, ...] = ()
    install: str = ""

    def refusal(self, model: Model) -> str | None:
        """The reason why it cannot take a model, or None."""
        if reason := find_format(model.format).refusals(quantization_of(model.folder)).get(self.name):
            return reason
        formats, others = self.opens
        return None if model.format in formats else others


def _llamacpp(model: Model, address: ServerAddress) -> Command:
    # By default a second request would cut the first one's answer off, and every prompt token's logits be computed.
    return Command(
        (
            *(address.python, "-m", "llama_cpp.server", "--model", str(_file(model)), "--model_alias", address.name),
            *("--host", address.host, "--port", str(address.port), "--n_ctx", str(address.n_ctx)),
            *("--n_threads", str(address.threads), "--n_threads_batch", str(address.threads)),
            *("--interrupt_requests", "False", "--logits_all", "False"),
        )
    )


def _llama_server(model: Model, address: ServerAddress) -> Command:
    return Command(
        (
            *("llama-server", "--model", str(_file(model)), "--alias", address.name, "--host", address.host),
            *("--port", str(address.port), "--ctx-size", str(address.n_ctx), "--threads", str(address.threads)),
        )
    )


def _vllm(model: Model, address: ServerAddress) -> Command:
    return Command(
        (
            *(address.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(_folder(model))),
            *("--served-model-name", address.name, "--host", address.host, "--port", str(address.port)),
            *("--max-model-len", str(address.n_ctx), "--dtype", "bfloat16"),
        ),
        {
            "OMP_NUM_THREADS": str(address.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # GiB of keys and values. Without it vLLM wants nearly all memory of a machine without a card, or ends.
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "4"),
        },
    )


def _sglang(model: Model, address: ServerAddress) -> Command:
    return Command(
        (
            *(address.python, "-m", "sglang.launch_server", "--model-path", str(_folder(model))),
            *("--served-model-name", address.name, "--host", address.host, "--port", str(address.port)),
            *("--context-length", str(address.n_ctx)),
        )
    )


def _tgi(model: Model, address: ServerAddress) -> Command:
    kind = {"gptq": "gptq", "awq": "awq", "bitsandbytes": "bitsandbytes-nf4"}.get(model.format)
    return Command(
        (
            *("docker", "run", "--gpus", "all", "--shm-size", "1g", "-p", f"{address.host}:{address.port}:80"),
            *("-v", f"{_folder(model)}:/model:ro", "ghcr.io/huggingface/text-generation-inference"),
            *(
                "--model-id",
                "/model",
                *(("--quantize", kind) if kind else ()),
                "--max-total-tokens",
                str(address.n_ctx),
            ),
        )
    )


def _tabbyapi(model: Model, address: ServerAddress) -> Command:
    folder = _folder(model)
    return Command(
        (
            *(address.python, "main.py", "--model-dir", str(folder.parent), f"--model-name={folder.name}"),
            *("--host", address.host, "--port", str(address.port), "--max-seq-len", str(address.n_ctx)),
        )
    )


def _folder(model: Model) -> Path:
    return model.folder.resolve()


def _file(model: Model) -> Path:
    return model.weight_files[0].resolve()


SERVERS = {
    server.name: server
    for server in (
        Server(
            "llamacpp",
            "llama-cpp-python's server",
            GGUF,
            _llamacpp,
            ("llama_cpp", "uvicorn", "fastapi", "sse_starlette", "starlette_context", "pydantic_settings"),
            "pip install 'quantkit[serve]'",
        ),
        Server(
            "vllm",
            "vLLM's server",
            FOLDERS,
            _vllm,
            ("vllm",),
            "vLLM needs an environment of its own: pip install vllm there, and give its interpreter with --python",
        ),
        Server("llama-server", "llama.cpp's own server", GGUF, _llama_server),
        Server("sglang", "SGLang", FOLDERS, _sglang),
        Server("tgi", "Text Generation Inference, in Docker", FOLDERS, _tgi),
        Server("tabbyapi", "TabbyAPI, exllama's server, from its folder", EXLLAMA, _tabbyapi),
    )
}  # fmt: skip


def find_server(name: str) -> Server:
    """Look a server up; raises RecipeError."""
    if name not in SERVERS:
        raise RecipeError(f"unknown server {name!r}.{near_miss(name, SERVERS)} Known: {', '.join(SERVERS)}.")
    return SERVERS[name]


def server_of(format_name: str) -> str | None:
    """What quantkit would start for an artifact of a format, in words; None where nothing takes it."""
    fitting = (server for server in SERVERS.values() if server.modules and format_name in server.opens[0])
    return next((server.summary for server in fitting), None)


def server_for(model: Model, name: str | None) -> Server:
    """The server of that name, or the first that takes the model; raises RecipeError and UnsupportedError."""
    if name is not None:
        server = find_server(name)
        if reason := server.refusal(model):
            raise UnsupportedError(f"{server.summary} cannot serve {model.label}: {reason}")
        return server
    for server in SERVERS.values():
        if server.modules and not server.refusal(model):
            return server
    raise UnsupportedError(
        f"no server that quantkit starts takes {model.label}. GGUF artifacts are served by llama.cpp; GPTQ, AWQ and "
        "unquantized models by vLLM."
    )
