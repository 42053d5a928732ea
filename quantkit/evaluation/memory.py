"""Estimate the peak memory of an evaluation, and plan a walk block by block for a model that does not fit whole.

The estimate is for the process that computes one model: its libraries, the engine's weights, activations, logits and,
for divergences, the source's output layer. Memory-mapped files do not count, since the system can drop their pages. On
a GPU, the estimate is for the GPU's memory.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from typing import Any

from quantkit.checkpoints.safetensors import ITEM_BYTES
from quantkit.contracts.engine import BATCH_TOKENS, Engine, WeightStats, Window, longest_in, positions_in, tokens_in
from quantkit.contracts.format import Format
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.errors import RecipeError, ResourceError, UnsupportedError
from quantkit.evaluation.engine_choice import REFERENCE, ChosenEngine, own_device, require
from quantkit.models.config import beside_states, open_config
from quantkit.models.source import Source
from quantkit.records.recipe import MemoryLimits
from quantkit.system.device import CPU, memory_of
from quantkit.system.memory import GROWTH, MemoryEstimate, free_memory
from quantkit.system.sizes import in_one_unit
from quantkit.system.untrusted import reraise_as

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
MB = 1_000_000
PROCESS = 400 * MB  # libraries after their first computation
OFFLOAD_BYTES = 20 * MB
LOGIT_ROWS, PIECE_ROWS = 256, 32  # positions per product with the output layer, and per scoring step
SLAB_BYTES = 34 * MB  # of the source's output layer converted to float32 at a time
RECORD_BYTES = 32  # stored per scored position
CODES = 17  # bytes per weight while a layer's codes are unpacked


@dataclass(frozen=True)
class MemoryNeed(MemoryEstimate):
    """Estimated memory for computing one model in an engine; without phases if it is unknown."""

    process: int = PROCESS
    engine: str = ""
    walk: bool = False

    def fits(self, available: int) -> bool:
        """Return whether at most `available` bytes are needed; true if the need is unknown."""
        return not self.phases or self.memory <= available

    @property
    def words(self) -> str:
        how = f"{self.engine}, block by block" if self.walk else self.engine
        return f"{how}, {self.memory / 1e9:.2f} GB" if self.phases else how


@dataclass(frozen=True)
class MemoryPlan:
    """How one model is computed: the engine, whole or block by block, the memory needed, and notes."""

    engine: ChosenEngine
    need: MemoryNeed
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelDims:
    """Sizes of a model, in numbers of values."""

    vocabulary: int
    hidden: int
    inner: int
    tied: bool
    blocks: int
    flowing: int  # values per token that pass from block to block
    tables: int  # values per token in all embeddings

    @property
    def head(self) -> int:
        """Return the number of weights of the output layer."""
        return self.vocabulary * self.hidden

    def activations(self, windows: tuple[Window, ...], item: int) -> int:
        """Return the bytes of a batch inside a block: the residual, attention's tensors, and the widest layer."""
        values = 7 * self.hidden + self.flowing + 4 * max(self.inner, 3 * self.hidden)
        return min(max(BATCH_TOKENS, longest_in(windows)), tokens_in(windows)) * item * values

    def logits(self, windows: tuple[Window, ...], item: int, divergence: bool) -> int:
        """Return the bytes of logits in memory at once; `divergence` adds the source's logits and temporaries."""
        rows = min(LOGIT_ROWS, positions_in(windows))
        own = rows * item + 2 * min(PIECE_ROWS, rows) * 4
        return self.vocabulary * (own + 3 * rows * 4 * divergence)


def dims_of(config: dict[str, Any]) -> ModelDims:
    """Return a model's sizes from its config.json; raises UnsupportedError."""
    settings = open_config(config).get_text_config()
    with reraise_as("the sizes in config.json cannot be used", UnsupportedError):
        hidden = int(settings.hidden_size)
        inner = getattr(settings, "intermediate_size", None) or getattr(settings, "ffn_dim", None) or 4 * hidden
        values = beside_states(settings)
        return ModelDims(
            vocabulary=int(settings.vocab_size),
            hidden=hidden,
            inner=max(inner) if isinstance(inner, list) else int(inner),
            tied=bool(getattr(settings, "tie_word_embeddings", False)),
            blocks=max(1, int(settings.num_hidden_layers)),
            flowing=hidden * values.states + values.of_text + values.shared,
            tables=hidden + values.of_text,
        )


def stats_of(model: Model) -> WeightStats:
    """Return the facts from which engines estimate the memory of a model's weights."""
    dims = dims_of(model.config)
    recipe = None if model.artifact is None else model.artifact.manifest.recipe
    return WeightStats(
        format=model.format,
        parameters=model.parameters,
        outside=min(dims.head if dims.tied else 2 * dims.head, model.parameters),
        weight_bytes=sum(path.stat().st_size for path in model.weight_files),
        dtype=model.dtype,
        bits=None if recipe is None else recipe.bits,
    )


def need_whole(
    engine: Engine,
    stats: WeightStats,
    dims: ModelDims,
    windows: tuple[Window, ...],
    dtype: str | None = None,
    head: int = 0,
    device: str = CPU,
) -> MemoryNeed:
    """Return the memory for a model that is loaded whole; `head`: bytes of the source's output layer."""
    if engine.holds is None:
        return MemoryNeed(engine=engine.name, device=device)
    tokens, item = longest_in(windows), ITEM.get(dtype or stats.dtype, 4)
    logits = dims.logits(windows, item, head > 0)
    if not engine.in_torch:  # such an engine returns the logits of a whole window, and they are copied
        logits = max(logits, 2 * tokens * dims.vocabulary * 4)
    activations = dims.activations(windows, item)
    weights = engine.holds(stats, dtype) + activations + logits + head + GROWTH
    return MemoryNeed(phases={"its weights": weights}, device=device, engine=engine.name)


def need_by_block(model: Model, engine: ChosenEngine, windows: tuple[Window, ...], head: int) -> MemoryNeed:
    """Return the memory for a model that is computed block by block; `head`: as in `need_whole`."""
    from torch import nn

    from quantkit.models.skeleton import open_skeleton

    dims, item = dims_of(model.config), ITEM[engine.dtype or "float32"]
    sizes, layers = [], []
    for block in open_skeleton(model.config).blocks:
        sizes.append(sum(p.numel() for p in block.parameters()))
        layers += [m.weight.numel() for m in block.modules() if isinstance(m, nn.Linear)]
    wave = wave_tokens(windows)
    states = wave * dims.flowing * item
    states = states if states <= engine.offload_bytes else 0
    stored = _stored_item(model)
    plain = model.source is not None and model.source.quantization is None
    rows = min(dims.vocabulary, wave) * dims.tables
    own_head = dims.head * (item if stored > item or not plain else min(stored, item))
    reading = 0 if plain else dims.head * stored
    later = own_head + head if tokens_in(windows) > wave else 0  # in memory during the next windows' blocks
    unpacking = max(layers, default=0) * (stored if plain else CODES)
    activations = dims.activations(windows, item)
    phases = {
        "the embedding": states + later + rows * (stored + 2 * item) + reading,
        "a decoder block": states + later + max(sizes) * item + unpacking + activations + GROWTH,
        "the output layer": states + own_head + reading + head + dims.logits(windows, item, head > 0) + GROWTH,
    }
    return MemoryNeed(phases=phases, device=engine.device, engine=REFERENCE, walk=True)


def need_of_copy(
    source: Source, kind: Format, nbytes: int, bits: str | None, windows: tuple[Window, ...]
) -> MemoryNeed:
    """Return the memory for a future artifact of `nbytes` bytes, loaded whole in its format's default engine."""
    stats = replace(stats_of(Model(None, source)), format=kind.name, weight_bytes=nbytes, bits=bits)
    dims = dims_of(source.config)
    return need_whole(find_engine(kind.engines[0]), stats, dims, windows, head=source_head_bytes(source))


def source_head_bytes(source: Source) -> int:
    """Return the bytes of the source's output layer, which divergences need in memory."""
    return dims_of(source.config).head * _stored_item(Model(None, source)) + SLAB_BYTES


def wave_tokens(windows: tuple[Window, ...]) -> int:
    """Return the number of tokens that pass through all blocks together in a walk (a wave)."""
    from quantkit.calibration.passes import WAVE_TOKENS

    return min(tokens_in(windows), max(WAVE_TOKENS, longest_in(windows)))


def disk_of(windows: tuple[Window, ...], plans: list[MemoryPlan], dims: ModelDims, divergence: bool) -> int:
    """Return the bytes of files: scored positions, the baseline, and offloaded hidden states."""
    positions = positions_in(windows)
    baseline = 2 * positions * dims.hidden if divergence else 0
    states = 4 * dims.flowing * wave_tokens(windows)
    offloaded = any(plan.engine.walk and states > plan.engine.offload_bytes for plan in plans)
    return RECORD_BYTES * positions + baseline + states * offloaded


def plan_memory(
    model: Model,
    engine: ChosenEngine,
    limits: MemoryLimits,
    windows: tuple[Window, ...],
    head: int = 0,
    what: str = "it",
) -> MemoryPlan:
    """Plan to compute a model whole with `engine` if that fits, else block by block with the reference engine.

    `what` names the model in notes. Raises ResourceError if neither fits, RecipeError if a walk is required and the
    requested engine cannot do it.
    """
    found, stats = find_engine(engine.name), stats_of(model)
    need = need_whole(found, stats, dims_of(model.config), windows, engine.dtype, head, engine.device)
    if limits.walk is False or (need.fits(_limit(need.device, limits)) and not limits.walk):
        return MemoryPlan(engine, need)
    walker = find_engine(REFERENCE)
    if (engine.named and not found.walks) or engine.kv_cache not in (None, *walker.kv_caches):
        if limits.walk:
            raise RecipeError(f"the engine {engine.name} cannot compute block by block. Give --engine {REFERENCE}.")
        raise _too_much(model, need, limits, "Leave --engine out, or skip this check with --no-walk.")
    dtype = engine.dtype or ("bfloat16" if model.source is None else stats.dtype)
    find_engine(REFERENCE).refuse(dtype)
    offload_bytes = OFFLOAD_BYTES if limits.offload_gb is None else int(limits.offload_gb * 1e9)
    changed = replace(
        engine, name=REFERENCE, version=engine.version if found.walks else require(find_engine(REFERENCE)),
        dtype=dtype, python=sys.executable, walk=True, offload_bytes=offload_bytes,
        device=own_device(engine.asked_device),
    )  # fmt: skip
    walking = need_by_block(model, changed, windows, head)
    if not walking.fits(_limit(walking.device, limits)):
        raise _too_much(model, walking, limits, "Give shorter windows, or use a machine with more memory.")
    note = f"{what} was computed block by block by the reference engine, as requested"
    if not limits.walk:
        needed, free = in_one_unit(need.memory, _limit(need.device, limits))
        note = (
            f"{what} was computed block by block by the reference engine: {engine.name} would need {needed} of "
            f"{memory_of(need.device)}, and {free} were free"
        )
    return MemoryPlan(changed, walking, (note,))


def _limit(device: str, limits: MemoryLimits) -> int:
    """Return the bytes of a device's memory that may be used: the user's limit, else the free memory."""
    return free_memory(device) if limits.max_memory_gb is None else int(limits.max_memory_gb * 1e9)


def _too_much(model: Model, need: MemoryNeed, limits: MemoryLimits, fix: str) -> ResourceError:
    needed, free = need.compared_with(_limit(need.device, limits))
    how = "block by block " if need.walk else ""
    return ResourceError(
        f"evaluating {shlex.quote(model.label)} {how}with {need.engine} would need {needed}, and {free} are free. {fix}"
    )


def _stored_item(model: Model) -> int:
    """Return the bytes per stored value, at most, outside the blocks."""
    if model.source is None:
        return 4
    return max((ITEM_BYTES.get(info.dtype, 4) for info in model.source.tensors.values()), default=4)
