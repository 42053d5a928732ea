"""What a method of quantizing must provide, and the Job that it is given: one conversion that was asked for.

A Job does not change while it runs. What the work finds out goes into the Findings of its Run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Generic

from typing_extensions import TypeVar

from quantkit.contracts.format import Content, Format, Layout, TensorWriter, following, leading
from quantkit.contracts.run import Checked, Plan, Run
from quantkit.errors import RecipeError, UnsupportedError, near_miss
from quantkit.models.source import Source
from quantkit.records.artifact import CalibrationEntry
from quantkit.records.recipe import ConvertRecipe, Strict, parse
from quantkit.system.ranks import Shards, joined_shards

if TYPE_CHECKING:
    import numpy as np

    from quantkit.models.skeleton import Skeleton

# Of jobs, which are only read; of methods, which also take them.
Options = TypeVar("Options", bound=Strict, covariant=True, default=Strict)
OwnOptions = TypeVar("OwnOptions", bound=Strict, default=Strict)
OwnPlan = TypeVar("OwnPlan", default=object)
TakenOptions = TypeVar("TakenOptions", bound=Strict, contravariant=True, default=Strict)


@dataclass(frozen=True)
class Shapes:
    """What a forecast needs of the largest decoder block, and of the tensors around the blocks.

    `stages` are (rows, columns) of linear layers, those that lie side by side in a module and have as many input
    columns as one. `states` hidden states of a token flow side by side, and with them values `of_text` that blocks are
    called with and values that blocks have `shared`. `reading` is what memory a tensor of a block takes while it is
    read (`Source.reading_bytes`), `reading_outside` one that lies in none.
    """

    block_parameters: int
    stages: tuple[tuple[int, int], ...]
    layers: tuple[tuple[int, int], ...]
    hidden: int
    vocabulary: int
    largest_outside: int
    item_bytes: int
    blocks: int = 1
    states: int = 1
    of_text: int = 0
    shared: int = 0
    reading: int = 0
    reading_outside: int = 0

    @property
    def widest(self) -> int:
        """Input columns of the widest layer."""
        return max((columns for _, columns in self.stages), default=0)

    @property
    def tallest(self) -> int:
        """Rows of the tallest stage."""
        return max((rows for rows, _ in self.stages), default=0)

    @property
    def largest_layer(self) -> int:
        """Values of the largest linear layer."""
        return max((rows * columns for rows, columns in self.layers), default=0)


@dataclass(frozen=True)
class PeakMemory:
    """What a method holds at its peak on a decoder block, for the forecast of memory.

    `streams` of activations (0: it does not calibrate; 1.25: a quarter of the sequences goes through the unquantized
    model, too); `suspended`: all batches wait inside the block; `work`: bytes beside the block, its activations and
    the forward pass; `further`: phases of its own, in words, and their bytes.
    """

    streams: float = 0
    suspended: bool = False
    work: int = 0
    further: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BitSearch(Generic[TakenOptions, OwnPlan]):
    """What a method chooses by long work before it writes, such as the bits of each layer.

    choose(job, run) gives the plan with what was chosen, and keeps that among the findings, so that unfinished work
    goes on with it. memory(job, shapes) names phases of it with the bytes that they hold.
    """

    choose: Callable[[CheckedJob[TakenOptions, OwnPlan], Run], OwnPlan]
    memory: Callable[[CheckedJob[TakenOptions, OwnPlan], Shapes], Mapping[str, int]]


@dataclass(frozen=True)
class Method(Generic[OwnOptions, OwnPlan]):
    """A way to quantize. It knows no file: what it makes goes to the job's format.

    Every format that holds what it `makes` can be written, `default_format` where none is asked for. With some bits it
    makes something else, or has another default format: `other_kinds` gives both.
    refuse_config(config) gives the reason why no model of this config.json can be taken, where the file alone tells it,
    without torch or transformers. check(job) refuses what cannot work, before any long work.
    write(job, run) makes the tensors and gives them to the format's writer, which writes into run.folder.
    weights_comparable: the stored values are near the source's, tensor by tensor. calibrated(options) says whether it
    needs calibration text, needs_torch(options) whether it needs torch, in this process or in transformers.
    peak_memory(job, shapes) says what memory the work on a decoder block takes; without it there is no forecast.
    refuse_ranks(job) gives the reason why several processes cannot share the work; None: they can.
    bits_of(source) gives the bits that the source decides where the user does not say any; None: the default.
    `bit_search` is done before `write`; None: nothing is left to be chosen after the check.
    `records` are what manifests have among the options and users cannot set: constants that decide bytes.
    """

    name: str
    summary: str
    reference: str
    bits: tuple[str, ...]
    default_bits: str
    Options: type[OwnOptions]
    makes: Content
    default_format: str
    check: Callable[[Job[OwnOptions]], Checked[OwnPlan]]
    write: Callable[[CheckedJob[OwnOptions, OwnPlan], Run], None]
    weights_comparable: bool = True
    calibrated: Callable[[OwnOptions], bool] = lambda _options: False
    needs_torch: Callable[[OwnOptions], bool] = lambda _options: True
    peak_memory: Callable[[CheckedJob[OwnOptions, OwnPlan], Shapes], PeakMemory] | None = None
    refuse_config: Callable[[Mapping[str, object]], str | None] = lambda _config: None
    other_kinds: Mapping[str, tuple[Content, str]] = field(default_factory=dict)
    bits_of: Callable[[Source], str | None] = lambda _source: None
    refuse_ranks: Callable[[Job[OwnOptions]], str | None] = lambda _job: "it is done by one"
    bit_search: BitSearch[OwnOptions, OwnPlan] | None = None
    records: tuple[str, ...] = ()

    def kind_of(self, bits: str | None) -> tuple[Content, str]:
        """What it makes with these bits (None: the default), and the default format for that."""
        return self.other_kinds.get(bits or self.default_bits, (self.makes, self.default_format))

    def parse_bits(self, bits: str | int | None) -> str:
        """Return the method's own spelling of `bits`; raises RecipeError."""
        if bits is None:
            return self.default_bits
        for known in self.bits:
            if known.lower() == str(bits).lower():
                return known
        raise RecipeError(
            f"the method {self.name} has no bits {str(bits)!r}.{near_miss(bits, self.bits)} "
            f"It has: {', '.join(self.bits)}."
        )

    def parse_options(self, options: Mapping[str, object]) -> OwnOptions:
        """Return the method's options record; raises RecipeError."""
        return parse(self.Options, dict(options), f"options of the method {self.name}")


@dataclass(frozen=True)
class CalibrationTokens:
    """The token ids (S, T) int64 that a model is calibrated on, and what the manifest says of them."""

    ids: np.ndarray
    entry: CalibrationEntry

    @cached_property
    def digest(self) -> str:
        """sha256 of the ids."""
        return hashlib.sha256(self.ids.tobytes()).hexdigest()


BATCH_TOKENS = 1024  # on the CPU
FEEDBACK_RECORD = (
    "error_feedback"  # what manifests of methods that round so, and leave no option of it, call its settings
)


@dataclass(frozen=True)
class Job(Generic[Options]):
    """A recipe with its opened source, its method and the format to write.

    `options` is the method's record. `device` is torch's name of where the maths runs, `batch_tokens` of calibration
    go through a block together, activations beyond `offload_bytes` go to files, and the process may take `max_memory`
    bytes (None: what is free). `shards` are the processes that share the work.
    """

    source: Source
    recipe: ConvertRecipe
    method: Method
    format: Format
    options: Options
    device: str
    offload_bytes: int
    max_memory: int | None = None
    batch_tokens: int = BATCH_TOKENS
    shards: Shards = field(default_factory=joined_shards)
    # Of all copies of the job, with the config.json that each was built of.
    _skeletons: list[tuple[Mapping[str, object], Skeleton]] = field(default_factory=list, repr=False, compare=False)

    @property
    def bits(self) -> str:
        """The bits, in the words of the method's users."""
        return self.recipe.bits or self.method.default_bits

    @property
    def skeleton(self) -> Skeleton:
        """The model without weights, built once. Whoever loads weights into it takes them out again."""
        from quantkit.models.skeleton import open_skeleton

        source = self.source
        for config, skeleton in self._skeletons:
            if config is source.config:
                return skeleton
        self._skeletons.append((source.config, open_skeleton(source.config, settings=source.settings)))
        return self._skeletons[-1][1]

    def check_layout(self, layout: Layout) -> Checked[Layout]:
        """Let the format refuse what it cannot hold; raises UnsupportedError, RecipeError."""
        if self.format.check is None:
            raise UnsupportedError(f"the format {self.format.name} takes no tensors one by one")
        return self.format.check(self.source, self.skeleton, layout)

    def open_writer(self, run: Run, layout: Layout) -> AbstractContextManager[TensorWriter]:
        """The format's writer into the run's folder; of several ranks the first one's alone writes."""
        if self.format.writer is None:
            raise UnsupportedError(f"the format {self.format.name} takes no tensors one by one")
        if self.shards.rank:
            return following(self.shards)
        return leading(self.format.writer(self.source, self.skeleton, run, layout), self.shards)


@dataclass(frozen=True)
class CheckedJob(Job[Options], Generic[Options, Plan]):
    """A job with what its check decided, and the calibration tokens of a method that calibrates."""

    _: KW_ONLY
    checked: Checked[Plan]
    calibration: CalibrationTokens | None = None

    @classmethod
    def of(
        cls, job: Job[Options], checked: Checked[Plan], calibration: CalibrationTokens | None = None
    ) -> CheckedJob[Options, Plan]:
        """The job with what was decided."""
        asked = {field.name: getattr(job, field.name) for field in fields(job)}
        return cls(**asked, checked=checked, calibration=calibration)


def with_layer_bits(job: CheckedJob, run: Run) -> CheckedJob:
    """The job with the bits of its layers in its plan, where they are chosen before the writing."""
    if (search := job.method.bit_search) is None:
        return job
    return replace(job, checked=replace(job.checked, plan=search.choose(job, run)))
