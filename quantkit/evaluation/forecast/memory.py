"""How much memory a judgement takes, and what is judged block by block because it does not fit whole.

Peak memory is that of a separate process. It counts the libraries, the weights that the engine holds, the activations
of a block, the logits and, for divergences, the source's output layer. Files that are only mapped into memory are not
counted: the system takes their pages back. On a GPU the forecast is of the GPU's memory.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quantkit.checkpoints.safetensors import ITEM_BYTES
from quantkit.contracts.engine import Engine, Holding
from quantkit.contracts.method import Job
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.contracts.windows import BATCH_TOKENS, Window
from quantkit.errors import RecipeError, ResourceError, UnsupportedError
from quantkit.evaluation.engine_choice import ChosenEngine, own_device, require
from quantkit.models.config import beside_states, open_config
from quantkit.models.source import Source
from quantkit.recipe import WalkSpec
from quantkit.system.device import CPU, memory_of
from quantkit.system.memory import GROWTH, free_memory
from quantkit.system.sizes import told_apart
from quantkit.untrusted import told

if TYPE_CHECKING:
    from torch import nn

WALKS = "reference"  # the engine that can
FLOAT32 = "float32"  # in which the source is computed for divergences
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
MB = 1_000_000
PROCESS = 440 * MB  # libraries, once they have computed something
OFFLOAD_BYTES = 20 * MB
LOGIT_ROWS = 256  # positions that go through an output layer together
SLAB_BYTES = 34 * MB  # of the source's output layer that are wide at a time
RECORD_BYTES = 32  # kept of a judged position
CODES = 17  # bytes a weight while a layer's codes are unpacked


@dataclass(frozen=True)
class Need:
    """What it takes to compute one model: `engine`, `walk`, and bytes at the peak (None: not forecast) by phase.

    They are bytes of the memory of `device`.
    """

    engine: str
    walk: bool
    phases: Mapping[str, int] = field(default_factory=dict)
    device: str = CPU

    @property
    def memory(self) -> int | None:
        """Bytes at the peak."""
        return PROCESS + max(self.phases.values()) if self.phases else None

    @property
    def words(self) -> str:
        """For the screen."""
        how = f"{self.engine}, block by block" if self.walk else self.engine
        return how if self.memory is None else f"{how}, {self.memory / 1e9:.2f} GB"


@dataclass(frozen=True)
class Settled:
    """How a model and its source's baseline are computed, where there is one to compute, and notes on it."""

    engine: ChosenEngine
    model: Need
    baseline: Need
    offload_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ends:
    """Sizes of what lies outside the blocks, and of what flows through them; how many blocks there are.

    `flowing` values of a token go from block to block, `tables` are in the rows of all embeddings of tokens together.
    """

    vocabulary: int
    hidden: int
    inner: int
    tied: bool
    blocks: int
    flowing: int
    tables: int

    @property
    def head(self) -> int:
        """Weights of the output layer."""
        return self.vocabulary * self.hidden


def ends_of(config: dict[str, Any]) -> Ends:
    """Those of the model of a config.json; raises UnsupportedError."""
    settings = open_config(config).get_text_config()
    with told("the sizes in config.json cannot be used", UnsupportedError):
        hidden = int(settings.hidden_size)
        inner = getattr(settings, "intermediate_size", None) or getattr(settings, "ffn_dim", None) or 4 * hidden
        tied = bool(getattr(settings, "tie_word_embeddings", False))
        blocks = max(1, int(settings.num_hidden_layers))
        beside = beside_states(settings)
        flowing = hidden * beside.states + beside.of_text + beside.shared
        inner = max(inner) if isinstance(inner, list) else int(inner)
        return Ends(int(settings.vocab_size), hidden, inner, tied, blocks, flowing, hidden + beside.of_text)


def holding_of(model: Model) -> Holding:
    """What engines go by who say what they hold of a model."""
    ends = ends_of(model.config)
    outside = ends.head if ends.tied else 2 * ends.head
    recipe = None if model.artifact is None else model.artifact.manifest.recipe
    return Holding(
        format=model.format,
        parameters=model.parameters,
        outside=min(outside, model.parameters),
        weight_bytes=sum(path.stat().st_size for path in model.weight_files),
        dtype=str(model.config.get("dtype") or model.config.get("torch_dtype") or FLOAT32).removeprefix("torch."),
        bits=None if recipe is None else recipe.bits,
    )


def whole(
    engine: Engine, holding: Holding, ends: Ends, dtype: str | None, tokens: int, head: int, device: str = CPU
) -> Need:
    """A model that is loaded whole; `tokens` of the longest window, `head` bytes of the source's output layer."""
    if engine.holds is None:
        return Need(engine.name, False, device=device)
    item = ITEM.get(dtype or holding.dtype, 4)
    flowing = _flowing(ends, tokens, item)
    # Other engines than those in torch give the logits of a window at once, which are copied.
    logits = _logits(ends) if engine.reads_values else max(_logits(ends), 2 * tokens * ends.vocabulary * 4)
    weights = engine.holds(holding, dtype) + flowing + logits + head + GROWTH
    return Need(engine.name, False, {"its weights": weights}, device)


def walked(model: Model, dtype: str, windows: tuple[Window, ...], offload_bytes: int, head: int) -> Need:
    """A model that is computed block by block, in `dtype`; the others as in `whole`."""
    from torch import nn

    from quantkit.models.skeleton import open_skeleton

    skeleton, ends, item = open_skeleton(model.config), ends_of(model.config), ITEM[dtype]
    blocks = [sum(p.numel() for p in block.parameters()) for block in skeleton.blocks]
    layers = [m.weight.numel() for m in _largest(skeleton.blocks).modules() if isinstance(m, nn.Linear)]
    tokens = sum(len(window.ids) for window in windows)
    wave = wave_tokens(windows)
    kept = wave * ends.flowing * item
    kept = kept if kept <= offload_bytes else 0
    stored = _stored_item(model)
    plain = model.source is not None and model.source.quantization is None
    rows = min(ends.vocabulary, wave) * ends.tables
    own_head = ends.head * (item if stored > item or not plain else min(stored, item))
    reading = ends.head * stored
    later = own_head + head if tokens > wave else 0  # beside the next windows' blocks
    longest = max(len(window.ids) for window in windows)
    phases = {
        "the embedding": kept + later + rows * (stored + 2 * item) + (0 if plain else reading),
        "a decoder block": kept
        + later
        + max(blocks) * item
        + max(layers, default=0) * (stored if plain else CODES)
        + _flowing(ends, longest, item)
        + GROWTH,
        "the output layer": kept + own_head + reading + head + _logits(ends) + GROWTH,
    }
    return Need(WALKS, True, phases)


def settle(
    model: Model,
    engine: ChosenEngine,
    memory: WalkSpec,
    windows: tuple[Window, ...],
    exact: Source | None,
    kept: Callable[[], bool],
    baseline_engine: str,
) -> Settled:
    """Who computes the model, and how much of it at a time.

    `exact` is the source that divergences are measured from; `baseline_engine` computes its baseline if it fits whole.
    `kept` says whether that is there already, and is asked only where it matters. Raises ResourceError with the figures
    where something fits in no way, RecipeError for an engine that cannot walk.
    """
    longest = max(len(window.ids) for window in windows)
    head = 0 if exact is None else ends_of(exact.config).head * _stored_item(Model(None, exact)) + SLAB_BYTES
    notes: list[str] = []
    chosen, need = _settle_one(model, engine, memory, windows, longest, head, notes, "it")
    baseline = Need(baseline_engine, False)
    if exact is not None:
        source = Model(None, exact)
        computing = replace(
            engine, name=baseline_engine, dtype=FLOAT32, python=sys.executable, named=False,
            device=own_device(engine.asked_device),
        )  # fmt: skip
        baseline = whole(
            find_engine(baseline_engine), holding_of(source), ends_of(exact.config), FLOAT32, longest, head,
            computing.device,
        )  # fmt: skip
        short = memory.walk is None and not _fits(baseline, memory)
        if (short or memory.walk) and not kept():
            what = "the source, for divergences,"
            _, baseline = _settle_one(source, computing, memory, windows, longest, head, notes, what)
    return Settled(chosen, need, baseline, offload_bytes(memory), tuple(notes))


def need_of_copy(job: Job, source: Source, windows: tuple[Window, ...]) -> Need:
    """What judging the artifact whole takes that a checked job is still to make, with the divergence from `source`."""
    holding = replace(
        holding_of(Model(None, source)), format=job.format.name, weight_bytes=job.checked.nbytes,
        bits=job.recipe.bits or job.method.default_bits,
    )  # fmt: skip
    longest, ends = max(len(window.ids) for window in windows), ends_of(source.config)
    head = ends.head * _stored_item(Model(None, source)) + SLAB_BYTES
    return whole(find_engine(job.format.engines[0]), holding, ends, None, longest, head)


def wave_tokens(windows: tuple[Window, ...]) -> int:
    """Tokens that go through all blocks together in a walk."""
    from quantkit.calibration.passes import WAVE_TOKENS

    every = [len(window.ids) for window in windows]
    return min(sum(every), max(WAVE_TOKENS, *every))


def disk_of(windows: tuple[Window, ...], settled: Settled, ends: Ends, judged: bool) -> int:
    """Bytes of files while all of it runs: judged positions, hidden states beyond what stays in memory, the baseline.

    `ends` are the source's; `judged`: divergences are measured.
    """
    positions = sum(len(window.targets) for window in windows)
    states = 2 * positions * ends.hidden if judged else 0
    walks = settled.model.walk or settled.baseline.walk
    flowing = 4 * ends.flowing * wave_tokens(windows) if walks else 0
    return RECORD_BYTES * positions + states + (flowing if flowing > settled.offload_bytes else 0)


def offload_bytes(memory: WalkSpec) -> int:
    """Of the hidden states that stay in memory."""
    return OFFLOAD_BYTES if memory.offload_gb is None else int(memory.offload_gb * 1e9)


def _settle_one(
    model: Model,
    engine: ChosenEngine,
    memory: WalkSpec,
    windows: tuple[Window, ...],
    longest: int,
    head: int,
    notes: list[str],
    what: str,
) -> tuple[ChosenEngine, Need]:
    """The engine for one model, and what it takes; `what` names the model in the notes."""
    found = find_engine(engine.name)
    need = whole(found, holding_of(model), ends_of(model.config), engine.dtype, longest, head, engine.device)
    if memory.walk is False:
        return engine, need
    if _fits(need, memory) and not memory.walk:
        return engine, need
    if engine.named and not found.walks:
        if memory.walk:
            raise RecipeError(f"the engine {engine.name} does not compute block by block. Take --engine {WALKS}.")
        raise _too_much(model, need, memory, "Leave --engine out, or try it all the same with --no-walk.")
    dtype = engine.dtype or ("bfloat16" if model.source is None else holding_of(model).dtype)
    find_engine(WALKS).refuse(dtype)
    version = engine.version if found.walks else require(find_engine(WALKS))
    changed = replace(
        engine, name=WALKS, version=version, dtype=dtype, python=sys.executable, walk=True,
        offload_bytes=offload_bytes(memory), device=own_device(engine.asked_device),
    )  # fmt: skip
    walking = replace(walked(model, dtype, windows, changed.offload_bytes, head), device=changed.device)
    if not _fits(walking, memory):
        raise _too_much(model, walking, memory, "Give shorter windows, or take a machine with more memory.")
    if memory.walk:
        notes.append(f"{what} was computed block by block by our own reader, as was asked for")
    else:
        needed, free = told_apart(need.memory or 0, _limit(need.device, memory))
        notes.append(
            f"{what} was computed block by block by our own reader: {engine.name} would need {needed} of "
            f"{memory_of(need.device)} for all of it, and {free} were free"
        )
    return changed, walking


def _limit(device: str, memory: WalkSpec) -> int:
    """Most bytes to take of a device's memory: what the user gave, else what is free there."""
    return free_memory(device) if memory.max_memory_gb is None else int(memory.max_memory_gb * 1e9)


def _fits(need: Need, memory: WalkSpec) -> bool:
    return need.memory is None or need.memory <= _limit(need.device, memory)


def _too_much(model: Model, need: Need, memory: WalkSpec, fix: str) -> ResourceError:
    needed, free = told_apart(need.memory or 0, _limit(need.device, memory))
    phase = max(need.phases, key=lambda name: need.phases[name])
    how = "block by block " if need.walk else ""
    return ResourceError(
        f"judging {shlex.quote(model.label)} {how}with {need.engine} would need {needed} of {memory_of(need.device)} "
        f"({PROCESS / 1e9:.2f} GB for the process, {need.phases[phase] / 1e9:.2f} GB for {phase}), and {free} are "
        f"free. {fix}"
    )


def _stored_item(model: Model) -> int:
    """Bytes of a value outside the blocks as it is read."""
    if model.source is None:
        return 4
    return max((ITEM_BYTES.get(info.dtype, 4) for info in model.source.tensors.values()), default=4)


def _flowing(ends: Ends, tokens: int, item: int) -> int:
    """What a batch takes inside a block: the residual and what attention has of it, and the widest layer."""
    beside = ends.flowing - ends.hidden
    return max(BATCH_TOKENS, tokens) * item * (8 * ends.hidden + beside + 4 * max(ends.inner, 3 * ends.hidden))


def _logits(ends: Ends) -> int:
    return 3 * LOGIT_ROWS * ends.vocabulary * 4


def _largest(blocks: Any) -> nn.Module:
    largest: nn.Module = max(blocks, key=lambda block: sum(p.numel() for p in block.parameters()))
    return largest
