"""Engine CTranslate2, on a CPU: https://opennmt.net/CTranslate2/python/ctranslate2.Generator.html

This file imports neither torch nor transformers, so that the process stays small. CTranslate2 4.8 reads out of bounds
for a token id beyond the vocabulary and crashes on an empty sequence; both are refused here. Not supported: GPUs, and
batches (windows are computed one by one).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from quantkit.contracts.engine import KERNEL_VARIABLES, Engine, LoadedModel, LoadSpec, WeightStats
from quantkit.contracts.model import Model
from quantkit.errors import EngineError, UnsupportedError, missing_package, pip_line
from quantkit.formats.ctranslate2.model_file import open_ct2_model, read_vocabulary
from quantkit.system.processor import cpuinfo
from quantkit.system.untrusted import reraise_as

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quantkit.contracts.engine import Window


def compute_type_for(bits: str, supported: Collection[str]) -> str:
    """Return the compute type of `supported` that preserves the values of an artifact with these `bits`.

    float16 and bfloat16 become float32 on CPUs without them; so does int16, which CTranslate2 would requantize to int8.
    """
    exact = [bits] if bits != "int8" else []
    if bits.startswith("int8"):
        exact.append("int8_float32")
    return next((kind for kind in exact if kind in supported), "float32")


def saturates(processor: str | None = None) -> bool:
    """Return whether CTranslate2's int8 products saturate on a processor (/proc/cpuinfo text; default: this machine).

    On x86 processors not made by Intel, CTranslate2 multiplies int8 with oneDNN, which without VNNI instructions adds
    pairs of products in 16 bits: https://uxlfoundation.github.io/oneDNN/dev_guide_int8_computations.html
    """
    words = set((cpuinfo() if processor is None else processor).split())
    return "avx2" in words and not words & {"GenuineIntel", "avx512_vnni", "avx_vnni"}


def notes_on(compute_type: str) -> tuple[str, ...]:
    """Return notes on accuracy losses of `compute_type` on this processor."""
    if not compute_type.startswith("int8") or not saturates():
        return ()
    return (
        f"{compute_type} loses accuracy on this processor, as the engine's int8 products saturate (no VNNI "
        "instructions); float32 computes the same weights exactly, but slower",
    )


class Ct2Generator:
    """A model loaded by CTranslate2 (see `LoadedModel`); `dtype` is the compute type."""

    def __init__(self, folder: Path, compute_type: str, threads: int, notes: tuple[str, ...] = ()) -> None:
        """Open the model in `folder`; raises ArtifactError for damaged files, DependencyError, EngineError."""
        ctranslate2 = import_engine()
        open_ct2_model(folder / "model.bin")
        self._vocabulary = read_vocabulary(folder / "vocabulary.json")
        with reraise_as(f"CTranslate2 cannot open {folder}", EngineError):
            self._generator = ctranslate2.Generator(
                str(folder), device="cpu", compute_type=compute_type, intra_threads=threads, inter_threads=1
            )
        self.dtype = str(self._generator.compute_type)
        self.notes = notes

    def pieces(self, windows: Sequence[Window]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits (n, V) of each window's scored positions; the engine returns whole windows."""
        for window in windows:
            yield self.window(window.ids.tolist())[window.scored]

    def window(self, ids: list[int]) -> NDArray[np.float32]:
        """Return the logits (T, V) float32 of all positions of a window of T tokens.

        Raises EngineError for ids outside the vocabulary, and if the engine fails.
        """
        self._refuse_ids(ids)
        with reraise_as(f"CTranslate2 failed on a window of {len(ids)} tokens", EngineError):
            answer = np.asarray(self._generator.forward_batch([ids]))
        if answer.shape != (want := (1, len(ids), len(self._vocabulary))):
            raise EngineError(f"CTranslate2 returned the shape {answer.shape}, expected {want}")
        logits: NDArray[np.float32] = answer[0]
        return logits

    def stream(self, ids: list[int], count: int) -> Iterator[int]:
        """Yield `count` greedy tokens after the prompt `ids`, also past EOS, each as soon as it is generated.

        Raises EngineError for ids outside the vocabulary, and if the engine stops early.
        """
        self._refuse_ids(ids)
        # An empty list of end tokens never ends; None would mean EOS, and min_length would forbid EOS.
        steps = self._generator.generate_tokens(
            [self._vocabulary[i] for i in ids], max_length=count, end_token=[], sampling_topk=1
        )
        made = 0
        try:
            for step in steps:
                made += 1
                yield int(step.token_id)
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"CTranslate2 failed after {made} tokens: {error}") from None
        finally:
            steps.close()
        if made != count:
            raise EngineError(f"CTranslate2 stopped after {made} of {count} tokens")

    def _refuse_ids(self, ids: list[int]) -> None:
        if not ids:
            raise EngineError("CTranslate2 needs at least one token")
        if min(ids) < 0 or max(ids) >= len(self._vocabulary):
            raise EngineError(
                f"the token ids {min(ids)}..{max(ids)} are outside the vocabulary of {len(self._vocabulary)} tokens"
            )


def import_engine() -> ModuleType:
    """Import and return the module ctranslate2; raises DependencyError."""
    try:
        import ctranslate2
    except ImportError as error:
        raise missing_package("ctranslate2", "ctranslate2", error) from None
    return ctranslate2


def _refuse(dtype: str | None) -> None:
    if dtype is not None and dtype not in (supported := import_engine().get_supported_compute_types("cpu")):
        raise UnsupportedError(
            f"CTranslate2 cannot compute in {dtype} on this CPU. It can: {', '.join(sorted(supported))}."
        )


def _load(model: Model, spec: LoadSpec) -> LoadedModel:
    if model.artifact is None:
        raise EngineError(f"CTranslate2 opens only artifacts, and {model.folder} is not one")
    bits = model.artifact.manifest.recipe.bits or "int8"
    supported = import_engine().get_supported_compute_types("cpu")
    compute_type = spec.dtype or compute_type_for(bits, supported)
    notes = notes_on(compute_type)
    if bits not in (compute_type, "int8"):
        notes += (f"stored as {bits}, computed in {compute_type} on this CPU",)
    return Ct2Generator(model.folder, compute_type, spec.threads, notes)


def _holds(stats: WeightStats, dtype: str | None) -> int:
    # Types that the processor lacks become float32.
    quantized = (stats.bits or "").startswith("int8") and dtype in (None, stats.bits)
    return stats.weight_bytes if quantized else max(4 * stats.parameters, stats.weight_bytes)


ENGINE = Engine(
    name="ctranslate2",
    module="ctranslate2",
    install=f"Install it with: {pip_line('ctranslate2')}",
    opens="CTranslate2 opens only artifacts of the method ctranslate2",
    load=_load,
    holds=_holds,
    refuse=_refuse,
    process="both",
    variables=("CT2_", *KERNEL_VARIABLES),
)
