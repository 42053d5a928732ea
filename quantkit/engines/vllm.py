"""Engine vLLM in this process: checkpoints in transformers' formats, with its CPU wheel or on a GPU.

vLLM pins its dependencies and rarely fits into another environment, so name its interpreter with `--python`. Its model
returns the hidden states of a prompt, and its output layer computes their logits, a few positions at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from quantkit.contracts.engine import KERNEL_VARIABLES, Engine, LoadSpec, refuse_dtype
from quantkit.contracts.format import ON_CPU
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_format
from quantkit.errors import DependencyError, EngineError, RecipeError
from quantkit.formats._quantization_config import quantization_of
from quantkit.system.device import AUTO, CPU
from quantkit.system.untrusted import reraise_as

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from vllm import LLMEngine

    from quantkit.contracts.engine import Window

DTYPES = ("bfloat16", "float16", "float32")
GPU_CACHE_BYTES = 1 << 30  # KV cache; by default vLLM takes nearly the whole GPU
PIECE_ROWS = 32  # positions that go through the output layer together
LEAST_BATCH = 2048
NOT_COMPILED = "vLLM without torch.compile, which takes minutes at each start; its server generates faster"
ROUNDED = "activations rounded to 8 bits, as vLLM does on this processor unless VLLM_CPU_INT4_W4A8=0"
# Set if the user has not: a small cache of keys and values, for one sequence; threads by OMP_NUM_THREADS; one token
# more than the context, since vLLM samples one that nobody reads.
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmModel:
    """A loaded vLLM engine that computes one sequence at a time; see `LoadedModel`."""

    def __init__(self, engine: LLMEngine, module: torch.nn.Module, dtype: str, notes: tuple[str, ...]) -> None:
        self._engine = engine
        self._module = module
        self.dtype = dtype
        self.notes = notes
        self._requests = 0

    def pieces(self, windows: Sequence[Window]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits (n, V) of the scored positions in order, at most `PIECE_ROWS` positions at a time."""
        for window in windows:
            yield from self._parts(window.ids.tolist(), window.scored)

    def _parts(self, ids: list[int], scored: slice) -> Iterator[NDArray[np.float32]]:
        import torch

        seen: list[torch.Tensor] = []

        def keep(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
            seen.append(output[: len(ids)].clone())

        handle = self._module.register_forward_hook(keep)
        try:
            for _ in self.stream(ids, 1):
                pass
        finally:
            handle.remove()
        if len(seen) != 1 or len(seen[0]) != len(ids):
            raise EngineError(f"vLLM did not read {len(ids)} tokens in one step, but {[len(part) for part in seen]}")
        with torch.inference_mode():
            for part in seen[0][scored].split(PIECE_ROWS):
                logits = self._module.compute_logits(part)  # type: ignore[operator]
                yield logits.to("cpu", torch.float32).numpy()

    def stream(self, ids: list[int], count: int) -> Iterator[int]:
        """Yield `count` greedy tokens after the prompt `ids`, each as soon as it is generated."""
        from vllm import SamplingParams

        self._requests += 1
        name = str(self._requests)
        settings = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": ids}, settings)
        made = 0
        try:
            while made < count:
                for done in self._engine.step():
                    tokens = done.outputs[0].token_ids
                    yield from tokens[made:]
                    made = len(tokens)
                    if done.finished and made < count:
                        raise EngineError(f"vLLM stopped after {made} of {count} tokens")
        finally:
            # A caller that stops early leaves an open request.
            self._engine.abort_request([name])
            while self._engine.has_unfinished_requests():
                self._engine.step()


def _import() -> ModuleType:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process: its memory is counted, its model can be asked
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
        import vllm.platforms
    except ImportError as error:
        raise DependencyError(f"vLLM cannot be imported ({error}). {ENGINE.install}.") from None
    return vllm


def _refuse_misread(model: Model, dtype: str | None, device: str) -> None:
    """Raise EngineError for files that vLLM loads on GPUs only, or that it would compute wrongly."""
    reason = find_format(model.format).refusals(quantization_of(model.folder)).get(ENGINE.name + ON_CPU)
    if reason and device == CPU:
        raise EngineError(f"vLLM cannot compute {model.folder} on a CPU: {reason}. Evaluate with --engine reference.")
    if model.artifact is not None:
        find_format(model.format).loaded_by(ENGINE.name).refuse(model.artifact, dtype, device)


def _load(model: Model, spec: LoadSpec) -> VllmModel:
    vllm, dtype = _import(), spec.dtype or "bfloat16"
    _refuse_misread(model, dtype, spec.device)
    with reraise_as(f"vLLM cannot load {model.folder}", EngineError):
        llm = vllm.LLM(
            model=str(model.folder), dtype=dtype, max_model_len=spec.n_ctx + 1, max_num_seqs=1, seed=0,
            max_num_batched_tokens=max(LEAST_BATCH, spec.n_ctx + 1), enable_prefix_caching=False,
            kv_cache_memory_bytes=None if spec.device == "cpu" else GPU_CACHE_BYTES, enforce_eager=True,
            trust_remote_code=False, disable_log_stats=True,
        )  # fmt: skip
        module, rounded = llm.apply_model(_inspect)[0]
    return VllmModel(llm.llm_engine, module, dtype, (NOT_COMPILED, *((ROUNDED,) if rounded else ())))


def _find_device(asked: str) -> str:
    built = CPU if _import().platforms.current_platform.is_cpu() else "cuda"
    if asked not in (AUTO, built):
        raise RecipeError(f"this vLLM is a build for {built}. Give --device {built}")
    return built


def _inspect(module: torch.nn.Module) -> tuple[torch.nn.Module, bool]:
    """Return the module, and whether one of its layers computes with 8-bit activations."""
    return module, any(getattr(layer, "use_w4a8", False) for layer in module.modules())


ENGINE = Engine(
    name="vllm",
    module="vllm",
    install="Give the interpreter of an environment that has it with --python (pip install vllm there)",
    opens="it loads checkpoints in transformers' formats only (unquantized, GPTQ, AWQ, compressed-tensors, NF4)",
    load=_load,
    find_device=_find_device,
    refuse=lambda dtype: refuse_dtype("vllm", dtype, DTYPES),
    refuse_model=_refuse_misread,
    variables=("VLLM_", *KERNEL_VARIABLES),
    server="vLLM's server",
)
