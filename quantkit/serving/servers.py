"""Commands that start each engine's OpenAI-compatible server, and which engine loads which format."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.contracts.check_manifest import refuse_untrue
from quantkit.contracts.format import ON_CPU, Format
from quantkit.contracts.model import NOT_ITS_FILES, Model
from quantkit.contracts.registry import engines, find_format, formats
from quantkit.errors import RecipeError, UnsupportedError, near_miss, one_line, pip_line
from quantkit.formats._quantization_config import quantization_of
from quantkit.formats.source import open_model
from quantkit.models.config import context_of, older_keys
from quantkit.records.recipe import ServeSpec, parse
from quantkit.system.interpreter import inspect_interpreter, version_numbers
from quantkit.system.processor import usable_cores

USUAL_CONTEXT = 4096  # default limit of tokens
USUAL_PARALLEL = 4  # requests answered at once by default, as llama-server does
LONGEST_NAME = 200  # characters of the name in the API


@dataclass(frozen=True)
class Server:
    """An engine's server; `loader` is the engine that loads the files, or one of a format's `servers`.

    `command` and `variables` may contain {python}, {host}, {port}, {n_ctx}, {parallel}, {threads}, the API's model
    {name}, the model's {folder}, its {parent} and {basename}, its first weight {file}, and {serving}, the folder of
    this module. The user's environment overrides variables without a placeholder. `modules` must be installed, the
    first in version `oldest` or later; without any, quantkit only prints the command.
    """

    name: str
    summary: str
    loader: str
    command: str
    variables: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    install: str = ""
    api_name: str | None = None  # if the server does not take {name}
    oldest: str = "0"

    def refusal(self, model: Model) -> str | None:
        reason = refusal(self.loader, find_format(model.format), quantization_of(model.folder))
        if reason is None and self.loader == "mlx" != model.format and "rope_theta" in older_keys(model.config):
            return "mlx-lm reads rope_theta, which its config.json has under a newer name. Convert it with --format mlx"
        return reason

    def shortfall(self, python: str) -> str | None:
        """Return what a Python interpreter lacks to start this server, with the command that installs it, or None."""
        missing, found = inspect_interpreter(python, self.modules)
        if missing:
            return f"{python} lacks {', '.join(missing)} for {self.summary}. {self.install}."
        if found is not None and version_numbers(found) < version_numbers(self.oldest):
            return f"{python} has {self.modules[0]} {found}; quantkit needs {self.oldest} or later. {self.install}."
        return None


SERVERS = {
    server.name: server
    for server in (
        Server("xllamacpp", "llama.cpp's server in xllamacpp", "llamacpp", """
            {python} -P {serving}/llama_server.py --model {file} --name {name} --host {host} --port {port}
            --n-ctx {n_ctx} --parallel {parallel} --threads {threads}""",
            modules=("xllamacpp",), install=pip_line("xllamacpp"), oldest="2026.10.11549"),
        # By default a second request interrupts the first one's answer, and logits are computed for all prompt tokens.
        Server("llamacpp", "llama-cpp-python's server", "llamacpp", """
            {python} -m llama_cpp.server --model {file} --model_alias {name} --host {host} --port {port} --n_ctx {n_ctx}
            --n_threads {threads} --n_threads_batch {threads} --interrupt_requests False --logits_all False""",
            modules=("llama_cpp", "uvicorn", "fastapi", "sse_starlette", "starlette_context", "pydantic_settings"),
            install=pip_line("serve")),
        # GiB of KV cache: by default vLLM takes nearly all memory of a machine without a GPU.
        Server("vllm", "vLLM's server", "vllm", """
            {python} -m vllm.entrypoints.openai.api_server --model {folder} --served-model-name {name}
            --host {host} --port {port} --max-model-len {n_ctx} --dtype bfloat16""",
            {"OMP_NUM_THREADS": "{threads}", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "4"},
            modules=("vllm",),
            install="vLLM needs its own environment: pip install vllm there, and give its interpreter with "
            "--python"),
        # Its API knows the model by this name alone: other names it would fetch from the hub.
        Server("mlx", "mlx-lm's server", "mlx", """
            {python} -m mlx_lm server --model {folder} --host {host} --port {port}""",
            modules=("mlx_lm",), install=pip_line("mlx"), api_name="default_model"),
        Server("llama-server", "llama.cpp's own server", "llamacpp", """
            llama-server --model {file} --alias {name} --host {host} --port {port} --ctx-size {n_ctx}
            --threads {threads}"""),
        Server("sglang", "SGLang", "sglang", """
            {python} -m sglang.launch_server --model-path {folder} --served-model-name {name}
            --host {host} --port {port} --context-length {n_ctx}"""),
        Server("tgi", "Text Generation Inference, in Docker", "tgi", """
            docker run --gpus all --shm-size 1g -p {host}:{port}:80 -v {folder}:/model:ro
            ghcr.io/huggingface/text-generation-inference --model-id /model --max-total-tokens {n_ctx}"""),
        Server("tabbyapi", "TabbyAPI, exllama's server, from its folder", "exllama", """
            {python} main.py --model-dir {parent} --model-name={basename} --host {host} --port {port}
            --max-seq-len {n_ctx}"""),
    )
}  # fmt: skip


@dataclass(frozen=True)
class ServerPlan:
    """How to start a server: its command, extra environment variables, its address, and the `plugins` that it needs."""

    server: Server
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    python: str
    host: str
    port: int
    name: str
    plugins: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{self.port}/v1"


def plan_server(artifact: str, engine: str | None = None, **settings: int | str | None) -> ServerPlan:
    """Plan a server's start and run all checks that are possible beforehand; raise a QuantkitError.

    `settings` are the other fields of `ServeSpec`.
    """
    spec = parse(ServeSpec, {"engine": engine, **settings}, "serve")
    model = open_model(artifact)
    if model.artifact is not None:
        refuse_untrue(model.artifact)
    if model.source is not None and not model.source.own_files:
        raise UnsupportedError(f"no server can load {model.name}: {NOT_ITS_FILES}.")
    python = spec.python or sys.executable
    server = choose_server(model, spec.engine, python)
    longest = context_of(model.config)
    if spec.n_ctx is not None and spec.n_ctx > longest:
        raise RecipeError(f"n_ctx = {spec.n_ctx}: the context of {model.label} has at most {longest} tokens")
    if spec.parallel is not None and "{parallel}" not in server.command:
        raise RecipeError(f"{server.summary} does not take --parallel; only xllamacpp does. Leave it out.")
    if server.api_name is not None and spec.name is not None:
        raise RecipeError(f"{server.summary} calls every model {server.api_name}. Leave --name out.")
    name = server.api_name or spec.name or re.sub(r"^-+", "", one_line(model.name, LONGEST_NAME)) or "model"
    folder = model.folder.resolve()
    places = {
        "python": python,
        "host": spec.host,
        "port": spec.port,
        "n_ctx": spec.n_ctx or min(longest, USUAL_CONTEXT),
        "parallel": spec.parallel or USUAL_PARALLEL,
        "threads": spec.threads or usable_cores(),
        "name": name,
        "folder": folder,
        "parent": folder.parent,
        "basename": folder.name,
        "file": model.weight_files[0].resolve(),
        "serving": Path(__file__).parent,
    }
    command = f"{server.command} {find_format(model.format).servers.get(server.loader, '')}"
    variables = {
        key: value.format(**places) if "{" in value else os.environ.get(key, value)
        for key, value in server.variables.items()
    }
    arguments = tuple(word.format(**places) for word in command.split())
    plugins = find_format(model.format).loaded_by(server.loader).plugins
    return ServerPlan(server, arguments, variables, python, spec.host, spec.port, name, plugins)


def choose_server(model: Model, name: str | None, python: str) -> Server:
    """Return the server called `name`, or the first that loads the model.

    Of two servers of one engine, the first that the interpreter `python` can start is returned. Raises RecipeError,
    UnsupportedError, or DependencyError if the interpreter cannot be run.
    """
    if name is None:
        started = [server for server in SERVERS.values() if server.modules]
        if first := next((server for server in started if not server.refusal(model)), None):
            alike = [server for server in started if server.loader == first.loader]
            return next((server for server in alike if len(alike) > 1 and not server.shortfall(python)), first)
        reasons = (f"{server.summary}: {server.refusal(model)}" for server in started)
        raise UnsupportedError(f"no server that quantkit starts can load {model.label}. {'. '.join(reasons)}.")
    if name not in SERVERS:
        raise RecipeError(f"unknown server {name!r}.{near_miss(name, SERVERS)} Known: {', '.join(SERVERS)}.")
    if reason := SERVERS[name].refusal(model):
        raise UnsupportedError(f"{SERVERS[name].summary} cannot serve {model.name} ({model.label}): {reason}.")
    return SERVERS[name]


def refusal(loader: str, stored: Format, quantization: Mapping[str, Any]) -> str | None:
    """Return why a program cannot load a format with this `quantization_config`, or None."""
    if reason := stored.refusals(quantization).get(loader):
        return reason
    if loader in stored.engines or loader in stored.servers:
        return None
    if loader in engines():
        return engines()[loader].opens
    return f"{loader} loads {' and '.join(name for name, other in formats().items() if loader in other.servers)} only"


def loaders() -> tuple[str, ...]:
    """Return the names that `what_loads` reports on: engines, reference first, and exllama, which only has a server."""
    return (*sorted(engines(), key=lambda name: name != "reference"), "exllama")


class Loads(NamedTuple):
    """Whether a program loads a kind of files: the oldest versions tested, why it does not, why only on GPUs."""

    tested: str
    refusal: str
    gpus_only: str


def what_loads() -> Iterator[tuple[str, str, dict[str, Loads]]]:
    """Yield (format, kinds that all programs treat alike, {program: whether it loads them})."""
    for stored in formats().values():
        alike: dict[tuple[str, tuple[Loads, ...]], list[str]] = {}
        for kind in stored.kinds:
            only = stored.refusals(kind.quantization)
            loaded = tuple(
                Loads(
                    stored.loaded_by(name).tested,
                    refusal(name, stored, kind.quantization) or "",
                    only.get(name + ON_CPU, ""),
                )
                for name in loaders()
            )
            alike.setdefault((kind.words, loaded), []).append(kind.bits)
        for (words, loaded), bits in alike.items():
            yield (
                stored.name,
                ", ".join(bits) + (f": {words}" if words else ""),
                dict(zip(loaders(), loaded, strict=True)),
            )
