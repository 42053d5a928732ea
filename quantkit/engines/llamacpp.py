"""Engine llama.cpp, by llama-cpp-python's low-level interface; imports no torch, since peak memory is measured."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from quantkit.contracts.engine import KERNEL_VARIABLES, Engine, LoadSpec
from quantkit.contracts.model import Model
from quantkit.errors import EngineError, RecipeError, missing_package, pip_line
from quantkit.system.device import AUTO, CPU
from quantkit.system.untrusted import reraise_as

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quantkit.contracts.engine import Window

BATCH = 512
ALL_LAYERS = 1 << 16  # more layers than any model has: put all on the GPU
PIECE_BYTES = 1 << 27  # of logits that are in memory at a time
LEAST_PIECE = 32
LOG_ERROR = 4  # ggml's level
CACHES = {"f16": 1, "q4_0": 2, "q8_0": 8}  # ggml's numbers of the types
FLASH_ATTENTION = 1  # llama.cpp's number of "enabled"


class LlamaModel:
    """A GGUF file loaded by llama.cpp, for one sequence of at most `n_ctx` tokens."""

    dtype = "the file's own types"

    def __init__(self, library: ModuleType, path: str, spec: LoadSpec) -> None:
        self._c = library
        self.notes: tuple[str, ...] = ()
        params = library.llama_model_default_params()
        params.n_gpu_layers = 0 if spec.device == "cpu" else ALL_LAYERS
        if b"AMX_INT8 = 1" in library.llama_print_system_info() and hasattr(params, "use_extra_bufts"):
            # Builds for AMX by some compilers crash in the tile set-up; the plain buffers avoid that code.
            params.use_extra_bufts = False
            self.notes = ("AMX switched off",)
        _ERRORS.clear()
        self._model = library.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise EngineError(
                f"llama.cpp cannot load {path}{''.join(f': {line}' for line in _ERRORS[:1])}. `quantkit verify` on its "
                "folder shows whether the file is damaged. If it is not, use another version of llama.cpp, or "
                "--engine reference."
            )
        context = library.llama_context_default_params()
        context.n_ctx = spec.n_ctx
        context.n_batch = max(BATCH, spec.n_ctx)
        context.n_ubatch = BATCH
        context.n_threads = context.n_threads_batch = spec.threads
        context.no_perf = True
        if spec.kv_cache is not None:
            context.type_k = context.type_v = CACHES[spec.kv_cache]
            context.flash_attn_type = FLASH_ATTENTION  # without it llama.cpp has no quantized values
        self._context = library.llama_init_from_model(self._model, context)
        if not self._context:
            raise EngineError(f"llama.cpp cannot make a context of {spec.n_ctx} tokens for {path}")
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._batch = library.llama_batch_init(context.n_batch, 0, 1)

    def set_threads(self, threads: int) -> None:
        self._c.llama_set_n_threads(self._context, threads, threads)

    def _decode(self, ids: list[int], start: int, first: int, last: int | None = None) -> None:
        """Decode `ids` at positions from `start` on; compute logits for indices `first` to `last` (exclusive)."""
        batch = self._batch
        last = len(ids) if last is None else last
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i] = token
            batch.pos[i] = start + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = first <= i < last
        if self._c.llama_decode(self._context, batch) != 0:
            raise EngineError(f"llama.cpp failed to decode {len(ids)} tokens at position {start}")

    def _clear(self) -> None:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)

    def pieces(self, windows: Sequence[Window]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits (n, V) float32 of the scored positions in order, at most about 128 MiB at a time."""
        limit = max(LEAST_PIECE, PIECE_BYTES // (4 * self._vocabulary))
        for window in windows:
            self._clear()
            ids, begin, stop = window.ids.tolist(), 0, window.scored.stop
            while begin < stop:
                # Unscored positions need no memory for logits, so they are decoded together with scored ones.
                end = min(len(ids), begin + BATCH, max(begin, window.first) + limit)
                end = len(ids) if end >= stop and len(ids) - begin <= BATCH else end
                first, last = max(window.first - begin, 0), min(stop, end) - begin
                self._decode(ids[begin:end], begin, first, last)
                if last > first:
                    pointer = self._c.llama_get_logits(self._context)
                    yield np.ctypeslib.as_array(pointer, shape=(last - first, self._vocabulary)).copy()
                begin = end

    def stream(self, ids: list[int], count: int) -> Iterator[int]:
        """Yield `count` greedy tokens after the prompt `ids`."""
        self._clear()
        self._decode(ids, 0, len(ids) - 1)
        position = len(ids)
        for made in range(count):
            pointer = self._c.llama_get_logits_ith(self._context, -1)
            token = int(np.ctypeslib.as_array(pointer, shape=(self._vocabulary,)).argmax())
            yield token
            if made + 1 < count:
                self._decode([token], position, 0)
                position += 1


def _silence(library: ModuleType) -> None:
    @library.llama_log_callback  # type: ignore[untyped-decorator]
    def quiet(level: int, text: bytes, _data: ctypes.c_void_p) -> None:
        if level == LOG_ERROR:
            _ERRORS.append(text.decode(errors="replace").strip().rstrip("."))

    library.llama_log_set(quiet, ctypes.c_void_p(0))
    _CALLBACKS.append(quiet)


_ERRORS: list[str] = []  # llama.cpp's errors since a model was loaded
_CALLBACKS: list[object] = []  # ctypes callbacks must outlive the library's use of them


def _library() -> ModuleType:
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise missing_package("llama-cpp-python", "llamacpp", ImportError(str(error))) from None
    return llama_cpp


def _refuse(dtype: str | None) -> None:
    if dtype is not None:
        raise RecipeError(f"llama.cpp computes in {LlamaModel.dtype}; leave the dtype {dtype!r} out")


def _find_device(asked: str) -> str:
    if asked == CPU:
        return CPU
    has_gpu = _library().llama_supports_gpu_offload()
    if asked not in (AUTO, *(["cuda"] * has_gpu)):
        raise RecipeError(f"this llama-cpp-python computes on cpu{', cuda' * has_gpu}")
    return "cuda" if has_gpu else CPU


def _load(model: Model, spec: LoadSpec) -> LlamaModel:
    llama_cpp = _library()
    _silence(llama_cpp)
    llama_cpp.llama_backend_init()
    with reraise_as(f"llama.cpp cannot load {model.folder}", EngineError):
        return LlamaModel(llama_cpp, str(model.weight_files[0]), spec)


ENGINE = Engine(
    name="llamacpp",
    module="llama_cpp",
    install=f"Install it with: {pip_line('llamacpp')}",
    opens="it loads GGUF files only",
    load=_load,
    holds=lambda stats, _dtype: stats.weight_bytes,
    find_device=_find_device,
    refuse=_refuse,
    process="both",
    variables=("GGML_", *KERNEL_VARIABLES),
    sets_threads=True,
    kv_caches=tuple(CACHES),
    server="llama-cpp-python's server",
)
